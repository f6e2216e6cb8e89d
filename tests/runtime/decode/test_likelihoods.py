"""The likelihoods of many pairs against the logits of `transformers`, whichever way they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

import ortgpt
from ortgpt import ContextLengthError
from ortgpt.decode import scoring
from ortgpt.decode.scoring import Pair, cut_pair, likelihoods, rolling_pairs
from ortgpt_exporter import export_bundle
from support import write_checkpoint

CONTEXT = [5, 190, 7, 61, 8, 33, 12, 90, 4, 77, 201, 18, 44, 9, 2, 150, 33, 21, 6, 88]


def expected(model: Any, pair: Pair) -> tuple[float, bool]:
    """Return what one plain run of the network says about a pair."""
    context, continuation = pair
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation][:-1]])).logits[0, -len(continuation) :].double()
    logprobs = torch.log_softmax(logits, -1)[range(len(continuation)), list(continuation)]
    return logprobs.sum().item(), logits.argmax(-1).tolist() == list(continuation)


def greedy(model: Any, context: Sequence[int], count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def some_pairs(model: Any) -> list[Pair]:
    """Return pairs that share contexts or inputs, that differ in all lengths, and of which some are greedy."""
    rng = np.random.default_rng(3)
    pairs: list[Pair] = [(CONTEXT, ids) for ids in ([1], [2], [3, 4], [3, 9], [3, 4, 5], greedy(model, CONTEXT, 6))]
    pairs += [([7, 9], greedy(model, [7, 9], 1)), ([7, 9], [3]), ([7], [9, 3]), (CONTEXT[:4], CONTEXT[4:6])]
    for length in (2, 3, 17, 40, 64, 65):
        ids = rng.integers(300, size=length).tolist()
        for count in {1, length // 2, length - 1}:
            pairs.append((ids[: length - count], ids[length - count :]))
    return pairs


@pytest.fixture(params=["native", "portable"])
def generator(request: pytest.FixtureRequest) -> ortgpt.Generator:
    found: ortgpt.Generator = request.getfixturevalue({"native": "small", "portable": "small_portable"}[request.param])
    return found


@pytest.mark.parametrize("piece", [128, 8], ids=["whole", "in pieces"])
def test_likelihoods_equal_those_of_transformers(
    generator: ortgpt.Generator, small_model: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(scoring, "_PIECE", piece)
    pairs = some_pairs(small_model)
    found = dict(likelihoods(generator.engine, pairs))
    assert sorted(found) == [*range(len(pairs))]
    want = [expected(small_model, pair) for pair in pairs]
    assert [found[index].logprob for index in range(len(pairs))] == pytest.approx([each[0] for each in want], abs=2e-4)
    assert [found[index].is_greedy for index in range(len(pairs))] == [each[1] for each in want]
    assert sum(each[1] for each in want) >= 2


def test_a_context_is_computed_once_where_that_is_faster_and_rows_together(
    small: ortgpt.Generator, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[list[int]] = []
    prefill = type(small.engine).prefill

    def counted(self: Any, cache: Any, prompts: Sequence[Sequence[int]], *rest: Any) -> Any:
        computed.append([len(ids) for ids in prompts])
        return prefill(self, cache, prompts, *rest)

    monkeypatch.setattr(type(small.engine), "prefill", counted)
    shared: list[Pair] = [(CONTEXT * 2, [token, 5]) for token in range(10)]
    list(likelihoods(small.engine, shared))
    assert computed == [[40], *[[1]] * 10]
    computed.clear()
    one_token: list[Pair] = [(CONTEXT * 2, [token]) for token in range(10)]
    list(likelihoods(small.engine, one_token))
    assert computed == [[40]]
    computed.clear()
    separate: list[Pair] = [([token, *CONTEXT[:9]], [5, token]) for token in range(40)]
    list(likelihoods(small.engine, separate))
    assert computed == [[11] * 23, [11] * 17]  # at most 256 positions


def test_a_context_of_an_odd_length_is_filled(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", n_positions=33)
    model = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    ids = np.random.default_rng(0).integers(300, size=34).tolist()
    pairs: list[Pair] = [(ids[:count], ids[count:]) for count in (1, 20, 33)]
    with ortgpt.load(export_bundle(checkpoint, tmp_path / "bundle").path) as generator:
        found = dict(likelihoods(generator.engine, pairs))
    for index, pair in enumerate(pairs):
        assert found[index].logprob == pytest.approx(expected(model, pair)[0], abs=2e-4)


def test_a_pair_loses_the_beginning_of_its_context() -> None:
    assert cut_pair([1, 2, 3], [4, 5], 4) == ([1, 2, 3], [4, 5])  # 4 are computed, and the fifth is only predicted
    assert cut_pair([0, 1, 2, 3], [4, 5], 4) == ([1, 2, 3], [4, 5])
    assert cut_pair([0, 1, 2, 3], [4, 5, 6, 7], 4) == ([3], [4, 5, 6, 7])
    with pytest.raises(ContextLengthError, match=r"continuation of 5 tokens \(accepted: at most the context of 4"):
        cut_pair([0], [1, 2, 3, 4, 5], 4)


@pytest.mark.parametrize(
    ("tokens", "pairs"),
    [
        (0, []),
        (1, [([99], [0])]),
        (4, [([99], [0, 1, 2, 3])]),
        (5, [([99], [0, 1, 2, 3]), ([0, 1, 2, 3], [4])]),
        # The example of LM.loglikelihood_rolling in lm_eval/api/model.py.
        (10, [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]),
    ],
)
def test_windows_are_those_of_the_harness(tokens: int, pairs: list[Pair]) -> None:
    assert rolling_pairs(99, range(tokens), 4) == pairs
