"""Sampling against `transformers`' own processors, and on distributions small enough to count by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ortgpt.sampling import warpers
from ortgpt.sampling.warpers import Floats, Ids

VOCAB = (7, 100, 1024, 50257)
TOP_K = (0, 1, 3, 50, 5000, 60000)
TOP_P = (0.0, 1e-9, 0.1, 0.5, 0.95, 1.0)


def candidates(logits: Floats, **options: Any) -> tuple[Ids, Floats]:
    """Return the candidates, and their weights as probabilities."""
    ids, weights = warpers.candidates(logits, **options)
    return ids, weights / weights.sum()


def expected(logits: Floats, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Return id → probability as `transformers` computes it."""
    scores = torch.from_numpy(logits.copy())[None]
    ids = torch.zeros(1, 0, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    probabilities = torch.softmax(scores, dim=-1)[0]
    return {i: p for i, p in enumerate(probabilities.tolist()) if p > 0}


@pytest.mark.parametrize("size", VOCAB)
@pytest.mark.parametrize(("spread", "mean"), [(0.01, 0.0), (3.0, -100.0), (40.0, 5.0)])
def test_kept_set_and_probabilities_equal_those_of_transformers(size: int, spread: float, mean: float) -> None:
    rng = np.random.default_rng(size)
    for top_k, top_p, temperature in itertools.product(TOP_K, TOP_P, (0.3, 1.0, 1.7)):
        logits = (rng.normal(size=size) * spread + mean).astype(np.float32)
        before = logits.copy()
        want = expected(logits, temperature, top_k, top_p)
        ids, probabilities = candidates(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        found = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
        # float32 sums differ in the last bits, so tokens at the edge of the nucleus may fall on either side of it.
        edge = sum(max(want.get(i, 0.0), found.get(i, 0.0)) for i in want.keys() ^ found.keys())
        assert edge <= (1e-3 if 0 < top_p < 1 else 1e-30), (size, spread, top_k, top_p, temperature)
        shared = want.keys() & found.keys()
        assert np.allclose([want[i] for i in shared], [found[i] for i in shared], rtol=3e-4, atol=1e-7)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-4)
        assert (np.diff(probabilities) <= 0).all() or (np.diff(ids) > 0).all()
        assert np.array_equal(logits, before)


def test_kept_set_is_exactly_that_of_transformers_away_from_edges() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probabilities).astype(np.float32)[[2, 0, 3, 1]]
    nuclei = [(0.0, 1), (1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (1.0, 4)]
    for top_p, count in nuclei:
        kept = [1, 3, 0, 2][:count]
        for top_k in (0, 4, 9):
            ids, _ = candidates(logits, temperature=1.0, top_k=top_k, top_p=top_p)
            assert ids.tolist() == sorted(kept)
            assert sorted(expected(logits, 1.0, top_k, top_p)) == sorted(kept)
    ids, found = candidates(logits, temperature=1.0, top_k=3, top_p=0.7)
    assert ids.tolist() == [1, 3]  # 0.4 + 0.3 of the 0.9 that top_k leaves
    assert found == pytest.approx([4 / 7, 3 / 7])


def test_a_wide_nucleus_is_that_of_a_sort() -> None:
    rng = np.random.default_rng(5)
    for spread, top_p in ((0.1, 0.05), (0.1, 0.5), (0.1, 0.999), (1.0, 0.9)):
        logits = (rng.normal(size=50257) * spread).astype(np.float32)
        probabilities = np.exp(logits.astype(np.float64))
        probabilities /= probabilities.sum()
        order = np.argsort(-logits, kind="stable")
        size = 1 + int((np.cumsum(probabilities[order]) < top_p).sum())
        ids, _ = candidates(logits, temperature=1.0, top_k=0, top_p=top_p)
        assert abs(len(ids) - size) <= 2
        # Neighbours whose float32 probabilities are equal may stand in either order.
        assert len({*ids.tolist()} ^ {*order[:size].tolist()}) <= 4


def test_ties_with_the_kth_token_stay() -> None:
    logits = np.array([1.0, 2.0, 1.0, 0.0, 1.0] * 100, np.float32)
    for top_k in (1, 100, 101, 150):
        ids, _ = candidates(logits, temperature=1.0, top_k=top_k, top_p=1.0)
        assert sorted(ids.tolist()) == sorted(expected(logits, 1.0, top_k, 1.0))
    assert len(ids) == 400


def test_impossible_tokens_are_never_candidates() -> None:
    logits = np.array([0.0, -np.inf, 1.0, -np.inf], np.float32)
    for top_k, top_p in ((3, 1.0), (4, 0.99), (0, 0.99), (0, 1 - 1e-9)):
        ids, _ = candidates(logits, temperature=1.0, top_k=top_k, top_p=top_p)
        assert sorted(ids.tolist()) == [0, 2]
    ids, probabilities = candidates(logits, temperature=1.0, top_k=0, top_p=1.0)
    rng = np.random.default_rng(0)
    assert {warpers.draw(ids, probabilities, rng) for _ in range(1000)} == {0, 2}


def test_a_tiny_temperature_is_greedy_and_stays_finite() -> None:
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for temperature in (1e-6, 1e-40, 1e-300):
        ids, probabilities = candidates(logits, temperature=temperature, top_k=50, top_p=1.0)
        assert (ids.tolist(), probabilities.tolist()) == ([logits.argmax()], [1.0])


def test_draws_follow_the_probabilities() -> None:
    ids = np.array([5, 9, 2, 7])
    probabilities = np.array([0.5, 0.25, 0.15, 0.1], np.float32)
    rng = np.random.default_rng(3)
    count = 20_000
    drawn = np.array([warpers.draw(ids, probabilities, rng) for _ in range(count)])
    observed = np.array([(drawn == token_id).sum() for token_id in ids])
    chi_square = (((observed - count * probabilities) ** 2) / (count * probabilities)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("size", [255, 256, 257, 1000, 50257])
def test_a_draw_among_many_is_where_the_number_falls_in_their_sums(size: int) -> None:
    probabilities = np.random.default_rng(size).exponential(size=size).astype(np.float32)
    probabilities[::3] = 0
    probabilities /= probabilities.sum()
    ids = np.arange(size)[::-1]
    sums = np.cumsum(probabilities, dtype=np.float64)
    numbers = np.random.default_rng(9).random(500)
    rng = np.random.default_rng(9)
    for number in numbers:
        drawn = warpers.draw(ids, probabilities, rng)
        assert drawn == ids[np.searchsorted(sums, number * sums[-1], side="right")]


def test_draws_at_the_ends_of_the_unit_interval() -> None:
    class Fixed:
        def __init__(self, value: float) -> None:
            self.value = value

        def random(self) -> float:
            return self.value

    ids, probabilities = np.array([4, 8, 6]), np.array([0.6, 0.3, 0.1], np.float32)
    for value, token_id in ((0.0, 4), (0.599, 4), (0.601, 8), (0.899, 8), (0.901, 6), (1 - 2**-53, 6)):
        assert warpers.draw(ids, probabilities, Fixed(value)) == token_id  # type: ignore[arg-type]
    weights = np.ones(1000, np.float32)
    weights[900:] = 0
    for value, token_id in ((0.0, 0), (0.5, 450), (1 - 2**-53, 899), (1.0, 899)):
        assert warpers.draw(np.arange(1000), weights, Fixed(value)) == token_id  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert warpers.greedy(np.array([0.0, 3.0, 1.0, 3.0], np.float32)) == 1
