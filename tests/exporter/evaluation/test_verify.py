"""The verification must accept a correct graph, and refuse every kind of wrong one."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt.bundle.manifest import Check
from ortgpt.engine.forward import Logits
from ortgpt_exporter.evaluation.verify import compare_logits, verify
from ortgpt_models import GPT, load_gpt


@pytest.fixture(scope="module")
def gpt(small_checkpoint: Path) -> GPT:
    return load_gpt(small_checkpoint)


def test_a_correct_graph_passes_every_check(small: ortgpt.Generator, gpt: GPT) -> None:
    named: list[str] = []
    checks = verify(small.engine, gpt, on_check=named.append)
    assert all(check.passed for check in checks)
    assert [check.name for check in checks] == named
    assert named == [
        "prefill of 1", "prefill of 2", "prefill of 17", "prefill of 64", "prefill in pieces", "6 cached steps",
        "ragged batch and 6 steps", "hidden states of a ragged batch",
    ]  # fmt: skip
    assert [check.positions for check in checks] == [1, 2, 17, 64, 17, 7, 21, 25]
    for check in checks:
        assert 0 < check.max_abs_diff < check.tolerance
        assert check.tolerance == pytest.approx(1e-4 * max(1, check.max_abs_logit), rel=1e-5)
        assert 0 < check.argmax_compared <= check.positions


@pytest.mark.parametrize(
    "name", ["wte.weight", "wpe.weight", "h.1.attn.c_attn.weight", "h.0.mlp.c_proj.bias", "ln_f.weight"]
)
def test_a_weight_that_is_off_is_noticed(small: ortgpt.Generator, gpt: GPT, name: str) -> None:
    other = copy.deepcopy(gpt)
    with torch.no_grad():
        other.get_parameter(name).mul_(1.01)
    assert not all(check.passed for check in verify(small.engine, other))


def test_a_wrong_position_is_noticed_at_the_end_of_the_context(small: ortgpt.Generator, gpt: GPT) -> None:
    other = copy.deepcopy(gpt)
    with torch.no_grad():
        other.wpe.weight[63] *= 3
    failed = [check.name for check in verify(small.engine, other) if not check.passed]
    assert failed == ["prefill of 64"]


def compare(expected: list[list[float]], logits: list[list[float]]) -> Check:
    pair: tuple[Logits, Logits] = (np.array(expected, np.float32), np.array(logits, np.float32))
    return compare_logits("x", iter([pair]), 1e-4)


def test_what_a_check_accepts() -> None:
    assert compare([[1.0, 2.0]], [[1.0, 2.0001]]).passed
    assert not compare([[1.0, 2.0]], [[1.0, 2.0003]]).passed
    assert compare([[-100.0, -90.0]], [[-100.009, -90.0]]).passed  # 1e-4 of the largest logit
    # The best token changes, but the two best logits lie within twice the difference.
    close = compare([[1.0, 1.00001]], [[1.00002, 1.0]])
    assert (close.passed, close.argmax_compared, close.argmax_differing) == (True, 0, 0)
    assert not compare([[1.0, 2.0]], [[1.0, float("nan")]]).passed
    assert not compare([[1.0, 2.0]], [[1.0, float("inf")]]).passed
