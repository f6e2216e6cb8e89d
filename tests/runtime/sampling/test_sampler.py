"""The pick of one row: the processors of `transformers` in order, on all logits or on enough of the largest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ortgpt import GenerationOptions
from ortgpt.sampling.sampler import Sampler


def test_processors_act_in_the_order_of_transformers() -> None:
    """Penalty, minimum length, temperature, top_k, top_p: the same distribution, and the draw that follows from it."""
    rng = np.random.default_rng(11)
    prompt = rng.integers(300, size=12).tolist()
    for trial in range(40):
        logits = (rng.normal(size=300) * 3).astype(np.float32)
        settings: dict[str, Any] = {
            "temperature": 0.8, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.5, "min_new_tokens": 3,
        }  # fmt: skip
        options = GenerationOptions(**settings, seed=trial, eos_token_id=int(logits.argmax()))
        pick = Sampler(options.resolve(GenerationOptions()), prompt, trial)
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(1.5),
                MinNewTokensLengthLogitsProcessor(12, 3, int(logits.argmax()), device="cpu"),
                TemperatureLogitsWarper(0.8),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.8),
            ]
        )
        scores = processors(torch.tensor([prompt]), torch.from_numpy(logits.copy())[None])
        probabilities = torch.softmax(scores, -1)[0].numpy().astype(np.float64)
        order = np.argsort(-probabilities, kind="stable")
        place = np.searchsorted(np.cumsum(probabilities[order]), np.random.default_rng(trial).random(), side="right")
        assert pick.pick(logits, prompt) == order[place]


def test_generated_tokens_are_penalised_too() -> None:
    options = GenerationOptions(repetition_penalty=100.0).resolve(GenerationOptions(eos_token_id=0))
    sampler = Sampler(options, [], None)
    new: list[int] = []
    for _ in range(5):
        new.append(sampler.pick(np.arange(5, dtype=np.float32) + 1, new))
    assert new == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"repetition_penalty": 1.3}, 1),
        ({"min_new_tokens": 2, "eos_token_id": [3, 4]}, 3),
        ({"seed": 1}, 50),
        ({"top_k": 7, "min_new_tokens": 2, "eos_token_id": [3, 4]}, 9),
        ({"top_k": 0, "temperature": 1.0}, None),
    ],
)
def test_how_many_logits_decide(options: dict[str, Any], count: int | None) -> None:
    resolved = GenerationOptions(**options).resolve(GenerationOptions())
    assert Sampler(resolved, [1], 0).top_count == count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7, "repetition_penalty": 0.8},
        {"seed": 1, "min_new_tokens": 4, "eos_token_id": list(range(0, 90, 7))},
    ],
)
def test_the_largest_logits_give_the_pick_of_all(options: dict[str, Any]) -> None:
    resolved = GenerationOptions(**options).resolve(GenerationOptions())
    whole, top = Sampler(resolved, [5, 6, 7], 9), Sampler(resolved, [5, 6, 7], 9)
    assert top.top_count is not None
    rng = np.random.default_rng(3)
    new: list[int] = []
    for _ in range(30):
        logits = (rng.normal(size=90) * 2).astype(np.float32)
        scores = logits.copy()
        ids = top.penalized_ids([5, 6, 7, *new])
        scores[ids] = np.where(scores[ids] < 0, scores[ids] * top.penalty, scores[ids] / top.penalty)
        largest = np.argsort(-scores, kind="stable")[: top.top_count]
        token_id = whole.pick(logits, [5, 6, 7, *new])
        assert top.pick_from_top(largest, scores[largest], [5, 6, 7, *new]) == token_id
        new.append(token_id)
