"""The bundles that are part of the runtime: they are what their checkpoints give, and `austen` is found by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import make_builtin
import ortgpt
from ortgpt.bundle.folder import BUILT_IN, Bundle, open_bundle
from ortgpt.cli.main import main
from ortgpt.tools.doctor import SELF_TEST, SELF_TEST_IDS, SELF_TEST_PROMPT
from ortgpt.tools.seal import seal_bundle
from ortgpt_exporter import export_bundle
from support import greedy_ids

SAME = ("format", "graphs", "precision", "tokenizer", "minimum_onnxruntime", "masked_tokens")


def check_same(kept: Bundle, fresh: Bundle, names: tuple[str, ...]) -> None:
    for name in names:
        assert getattr(kept.manifest, name) == getattr(fresh.manifest, name), name
    assert kept.config == fresh.config
    for name in ("config.json", "generation_config.json", "vocab.json", "merges.txt"):
        assert (kept.path / name).read_bytes() == (fresh.path / name).read_bytes()
    assert (kept.path / "model.onnx").stat().st_size == (fresh.path / "model.onnx").stat().st_size


def test_the_self_tests_bundle_is_what_export_makes_today(tmp_path: Path) -> None:
    make_builtin.write_checkpoint(tmp_path / "checkpoint")
    fresh = open_bundle(export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").path)
    check_same(open_bundle(SELF_TEST), fresh, SAME)
    vocab = json.loads((SELF_TEST / "vocab.json").read_text())
    prompt = [vocab[letter] for letter in SELF_TEST_PROMPT]
    assert tuple(greedy_ids(make_builtin.self_test_model(), prompt, len(SELF_TEST_IDS))) == SELF_TEST_IDS
    assert sum(path.stat().st_size for path in SELF_TEST.iterdir()) < 200_000


def test_the_built_in_austen_is_what_its_checkpoint_gives(tmp_path: Path) -> None:
    fresh = export_bundle("austen", tmp_path / "bundle", dtype="int4")
    kept = open_bundle(BUILT_IN / "austen")
    # What is measured when a bundle is made (its promise, its speeds) differs a little from machine to machine.
    check_same(kept, fresh, tuple(name for name in SAME if name != "precision"))
    assert kept.manifest.precision.parameters == fresh.manifest.precision.parameters
    assert kept.manifest.source == fresh.manifest.source
    stored, expected = (np.fromfile(each.path / "model.onnx.data", np.uint8) for each in (kept, fresh))
    assert np.mean(stored != expected) < 1e-3  # a scale may round otherwise on another CPU
    with ortgpt.load(kept.path) as one, ortgpt.load(fresh.path) as other:
        for prompt in ("It is a truth", "Emma"):
            assert one.generate(prompt, max_new_tokens=40).text == other.generate(prompt, max_new_tokens=40).text


def test_a_built_in_bundle_is_found_by_its_name_unless_a_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ortgpt.load("austen") as generator:
        assert generator.bundle.path == BUILT_IN / "austen"
        text = generator.generate("It is a truth", max_new_tokens=8).text
    done = CliRunner().invoke(main, ["generate", "austen", "It is a truth", "--max-new-tokens", "8"])
    assert (done.exit_code, done.stdout) == (0, text + "\n")
    shutil.copytree(SELF_TEST, "austen")
    with ortgpt.load("austen") as generator:
        assert generator.bundle.path == tmp_path / "austen"
    with pytest.raises(ortgpt.BundleNotFoundError):
        ortgpt.load("./Austen")


def test_the_error_says_what_is_there_under_the_name_of_a_built_in_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ortgpt.BundleError, match="austen is part of ortgpt"):
        seal_bundle("austen")
    (tmp_path / "austen").mkdir()
    with pytest.raises(ortgpt.BundleNotFoundError, match=r"holds no ortgpt\.json, and hides the built-in bundle"):
        ortgpt.load("austen")
