"""Pure functions from logits to a token id, in the order and meaning of `transformers`' logits warpers.

Randomness comes in as a numpy Generator. Knows no model, no text and no options object.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 128  # logits whose maximum is computed first
_TINY = np.finfo(np.float32).tiny
_DRAW_BLOCK = 256  # weights that are summed at once to find where a number falls


def candidates(
    logits: Floats, *, temperature: float, top_k: int, top_p: float, min_p: float = 0.0, typical_p: float = 1.0
) -> tuple[Ids, Floats]:
    """Return the ids that may be drawn and, in proportion to their probabilities, their weights.

    The filters apply in this order: temperature; the `top_k` largest (0: all; ties with the k-th stay); the smallest
    set of the most likely ids whose probabilities reach `top_p`; ids at least `min_p` times as likely as the most
    likely one; the most typical ids that reach `typical_p` (Meister et al. 2022). At least one id stays. With `top_k`
    the most likely come first, else ids are in order. `logits` is (vocab_size,) and does not change.
    """
    ids, weights = _most_likely(logits, temperature, top_k, top_p)
    if min_p > 0.0:
        kept = weights >= np.float32(min_p) * weights.max()
        ids, weights = ids[kept], weights[kept]
    if typical_p < 1.0:
        kept = _typical(weights, typical_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _most_likely(logits: Floats, temperature: float, top_k: int, top_p: float) -> tuple[Ids, Floats]:
    if top_k and top_k < logits.size:
        ids = largest(logits, top_k)
        weights = _weights(logits[ids], temperature)
        kept = _nucleus_size(weights, top_p)
        if not weights[kept - 1]:
            kept = int(np.count_nonzero(weights))
        return ids[:kept], weights[:kept]
    weights = _weights(logits, temperature)
    if top_p == 1.0:
        return np.arange(logits.size), weights
    ids = _nucleus_of_all(weights, top_p)
    return ids, weights[ids]


def draw(ids: Ids, weights: Floats, rng: np.random.Generator) -> int:
    """Draw one of `ids` by their weights, with one uniform number from `rng`."""
    number, begin = rng.random(), 0
    if weights.size > _DRAW_BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, weights.size, _DRAW_BLOCK), dtype=np.float64)
        cumulative = np.cumsum(sums)
        block, rest = _place(cumulative, number * cumulative[-1])
        begin = block * _DRAW_BLOCK
        within = np.cumsum(weights[begin : begin + _DRAW_BLOCK], dtype=np.float64)
    else:
        within = np.cumsum(weights, dtype=np.float64)
        rest = number * within[-1]
    return int(ids[begin + _place(within, rest)[0]])


def _place(cumulative: npt.NDArray[np.float64], number: float) -> tuple[int, float]:
    """Return the index of the part in which `number` falls, and how far into it."""
    index = int(np.searchsorted(cumulative, number, side="right"))
    if index == cumulative.size:  # rounded up: take the last part that is not empty
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index, number - (float(cumulative[index - 1]) if index else 0.0)


def greedy(logits: Floats) -> int:
    """Return the id of the largest logit, the lowest id among equals."""
    return int(logits.argmax())


def largest(logits: npt.NDArray[np.floating[Any]], k: int) -> Ids:
    """Return the ids of the k largest values and of those equal to the k-th, largest first, the lowest id among equals.

    Block-wise maxima leave few values to look at when k is small.
    """
    k = min(k, logits.size)
    count = logits.size // _BLOCK
    if k <= count // 4:
        # The k-th largest block maximum is a lower bound on the k-th largest value.
        maxima = logits[: count * _BLOCK].reshape(_BLOCK, count).max(axis=0)
        bound = np.partition(maxima, count - k)[count - k]
    else:
        bound = np.partition(logits, logits.size - k)[logits.size - k]
    ids = np.flatnonzero(logits >= bound)
    values = logits[ids]
    order = np.argsort(-values, kind="stable")
    values = values[order]
    return ids[order[: k + np.count_nonzero(values[k:] == values[k - 1])]]


def _nucleus_of_all(weights: Floats, top_p: float) -> Ids:
    """Return the ids of the nucleus of the whole vocabulary, in order, without sorting it.

    The upper half of their bits sorts positive floats into bins whose width is 1/128 of their values. Whole bins are
    taken from the top, and only the bin that reaches `top_p` is sorted.
    """
    bins = weights.view(np.int32) >> 16
    bins -= bins.min()
    reached = np.cumsum(np.bincount(bins, weights=weights)[::-1])
    wanted = top_p * reached[-1]
    place = int(np.searchsorted(reached, wanted, side="left"))
    last = reached.size - 1 - place
    inside = np.flatnonzero(bins == last)
    inside = inside[np.argsort(-weights[inside], kind="stable")]
    missing = wanted - (reached[place - 1] if place else 0.0)
    reached_inside = np.cumsum(weights[inside], dtype=np.float64)
    needed = inside[: 1 + np.searchsorted(reached_inside[:-1], missing, side="left")]
    kept = bins > last
    kept[needed[weights[needed] > 0]] = True
    return np.flatnonzero(kept)


def _nucleus_size(weights: Floats, top_p: float) -> int:
    """Count how many of the first of descending weights reach `top_p` of their sum, at least one."""
    if top_p == 1.0:
        return weights.size
    reached = np.cumsum(weights, dtype=np.float64)
    return 1 + int(np.searchsorted(reached[:-1], top_p * reached[-1], side="left"))


def _typical(weights: Floats, typical_p: float) -> npt.NDArray[np.bool_]:
    """Tell which weights stay: those whose surprise is nearest to the expected one, until they reach `typical_p`."""
    probabilities = weights / weights.sum(dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        distance = np.abs(surprise - np.nansum(probabilities * surprise))
    order = np.argsort(distance, kind="stable")
    last = np.searchsorted(np.cumsum(probabilities[order])[:-1], typical_p, side="left")
    kept: npt.NDArray[np.bool_] = (distance <= distance[order[last]]) & (weights > 0)
    return kept


def _weights(logits: Floats, temperature: float) -> Floats:
    """Return weights in proportion to the probabilities; the largest is 1."""
    result: Floats = logits - logits.max()
    with np.errstate(over="ignore"):  # at a tiny temperature all but the largest become -inf, as they should
        result /= max(np.float32(temperature), _TINY)
    return np.exp(result, out=result)
