from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from ortgpt.cli.main import main
from ortgpt_exporter import Quantization
from ortgpt_exporter.evaluation.divergence import Divergence
from ortgpt_exporter.evaluation.speed import Speed
from ortgpt_exporter.sweep import Trial, mark_frontier, plot_trials, sweep_bundle


def trial(size_bytes: int, kl: float, decode: float) -> Trial:
    divergence = Divergence(tokens=1, nll=1.0, baseline_nll=1.0, kl=kl, top1=1.0, top5=1.0)
    speed = Speed(prefill=1.0, decode=decode)
    return Trial(recipe=f"{size_bytes} {kl} {decode}", size_bytes=size_bytes, divergence=divergence, speed=speed)


def test_the_frontier_is_what_no_other_trial_dominates() -> None:
    trials = [trial(10, 0.1, 5.0), trial(5, 0.2, 5.0), trial(10, 0.2, 5.0), trial(11, 0.1, 9.0), trial(10, 0.1, 5.0)]
    marked = mark_frontier(trials)
    # A recipe whose logits are not finite is never on the frontier, and dominates none.
    assert [found.on_frontier for found in mark_frontier([trial(1, math.nan, 9.0), trial(5, 0.2, 5.0)])] == [
        False,
        True,
    ]
    assert [found.recipe for found in marked] == ["5 0.2 5.0", "10 0.1 5.0", "10 0.1 5.0", "10 0.2 5.0", "11 0.1 9.0"]
    assert [found.on_frontier for found in marked] == [True, True, True, False, True]


def test_recipes_that_fit_are_tried_and_measured(small_bundle: Path, tmp_path: Path) -> None:
    recipes = [
        Quantization(dtype="int8"),
        Quantization(dtype="int4", block_size=16),
        Quantization(dtype="int4", block_size=128),  # matrices of 48 do not divide
    ]
    trials = sweep_bundle(small_bundle, recipes=recipes)
    assert [found.recipe for found in trials] == [
        "int4, scale-search, blocks of 16",
        "int8, scale-search, blocks of 16",
    ]
    four, eight = trials
    assert four.size_bytes < eight.size_bytes
    assert 0 < eight.divergence.kl < four.divergence.kl < 1
    assert min(four.speed.decode, four.speed.prefill) > 0
    for name, start in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")):
        plot_trials(trials, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_command_writes_a_table(small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortgpt_exporter.sweep.RECIPES", (Quantization(dtype="int8"),))
    plot = str(tmp_path / "plot.svg")
    done = CliRunner().invoke(main, ["quantize", str(small_bundle), "--sweep", "--plot", plot])
    assert done.exit_code == 0, done.stderr
    head, row = done.stdout.splitlines()
    assert head.split() == ["quantised", "to", "MB", "ppl", "ratio", "KL", "prefill/s", "decode/s"]
    assert row.startswith("* int8, scale-search, blocks of 16")
    assert Path(plot).exists()
