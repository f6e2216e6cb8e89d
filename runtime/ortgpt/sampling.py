"""Pure functions from logits to a token id, in the order and meaning of `transformers`' logits processors.

Randomness comes in as a numpy Generator. Knows no model, no text and no options object.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_DRAW_BLOCK = 256  # probabilities that are added up at once to find where a number falls


def penalize_repetition(logits: Floats, token_ids: Ids, penalty: float) -> None:
    """Make every id in `token_ids` (no id twice) less likely where `penalty` is above 1, in place.

    Positive logits are divided by `penalty`, negative ones multiplied (Keskar et al. 2019, as `transformers` has it).
    """
    scores = logits[token_ids]
    logits[token_ids] = np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


def forbid(logits: Floats, token_ids: Iterable[int]) -> None:
    """Make the ids in `token_ids` impossible, in place."""
    logits[list(token_ids)] = -np.inf


def candidates(logits: Floats, *, temperature: float, top_k: int, top_p: float) -> tuple[Ids, Floats]:
    """Return the ids that may be drawn and their probabilities: with `top_k` the most likely first, else in order.

    Temperature, then the `top_k` largest (0: all; ties with the k-th stay), then the smallest set of the most likely
    ones whose probabilities reach `top_p`, at least one. `logits` is (vocab_size,) and stays as it is.
    """
    largest = logits.max()
    if not top_k or top_k >= logits.size:
        probabilities = _softmax(logits, largest, temperature)
        if top_p == 1.0:
            return np.arange(logits.size), probabilities
        ids = _nucleus_of_all(probabilities, top_p)
        probabilities = probabilities[ids]
    else:
        ids = np.flatnonzero(logits >= _kth_largest(logits, top_k))
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        probabilities = _softmax(logits[ids], largest, temperature)
        kept = min(_nucleus_size(probabilities, top_p), int(np.count_nonzero(probabilities)))
        ids, probabilities = ids[:kept], probabilities[:kept]
    return ids, probabilities / probabilities.sum()


def draw(ids: Ids, probabilities: Floats, rng: np.random.Generator) -> int:
    """Draw one of `ids`, with one uniform number from `rng`."""
    begin, rest = 0, rng.random() * probabilities.sum(dtype=np.float64)
    if probabilities.size > _DRAW_BLOCK:
        sums = np.add.reduceat(probabilities, np.arange(0, probabilities.size, _DRAW_BLOCK), dtype=np.float64)
        block, rest = _place(np.cumsum(sums), rest)
        begin = block * _DRAW_BLOCK
    within = np.cumsum(probabilities[begin : begin + _DRAW_BLOCK], dtype=np.float64)
    return int(ids[begin + _place(within, rest)[0]])


def _place(cumulative: npt.NDArray[np.float64], number: float) -> tuple[int, float]:
    """Return the part in which `number` falls, and how far into it."""
    index = min(int(np.searchsorted(cumulative, number, side="right")), cumulative.size - 1)  # it may be rounded up
    return index, number - (float(cumulative[index - 1]) if index else 0.0)


def greedy(logits: Floats) -> int:
    """Return the id of the largest logit, the lowest id among equals."""
    return int(logits.argmax())


def _kth_largest(logits: Floats, k: int) -> np.float32:
    """Return the k-th largest value. Block-wise maxima leave few values to look at when k is small."""
    block = 128
    blocks = logits[: logits.size // block * block].reshape(-1, block)
    if k <= len(blocks) // 4:
        # The k-th largest block maximum is a lower bound on the k-th largest value.
        maxima = blocks.max(axis=1)
        bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
        logits = logits[logits >= bound]
    value: np.float32 = np.partition(logits, logits.size - k)[logits.size - k]
    return value


def _nucleus_of_all(probabilities: Floats, top_p: float) -> Ids:
    """Return the ids of the nucleus of the whole vocabulary, in order, without a sort of it.

    The upper half of a number's bits sorts positive numbers into bins 1/128 of themselves wide. Whole bins are taken
    from the top, and only the one that reaches `top_p` is sorted.
    """
    bins = probabilities.view(np.int32) >> 16
    bins -= bins.min()
    reached = np.cumsum(np.bincount(bins, weights=probabilities)[::-1])
    place = int(np.searchsorted(reached, top_p, side="left"))
    if place == reached.size:  # all of them together, rounded, are less
        return np.flatnonzero(probabilities)
    last = reached.size - 1 - place
    inside = np.flatnonzero(bins == last)
    inside = inside[np.argsort(-probabilities[inside], kind="stable")]
    missing = top_p - (reached[place - 1] if place else 0.0)
    kept = bins > last
    kept[inside[: _nucleus_size(probabilities[inside], missing)]] = True
    return np.flatnonzero(kept)


def _nucleus_size(probabilities: Floats, top_p: float) -> int:
    """Count the leading entries of a descending distribution that are needed to reach `top_p`, at least one."""
    if top_p == 1.0:
        return probabilities.size
    reached = np.cumsum(probabilities[:-1], dtype=np.float64)
    return 1 + int(np.searchsorted(reached, top_p, side="left"))


def _softmax(logits: Floats, largest: np.float32, temperature: float) -> Floats:
    with np.errstate(over="ignore"):  # at a tiny temperature all but the largest go to -inf, as they should
        scores = (logits - largest) / max(np.float32(temperature), np.finfo(np.float32).tiny)
    weights = np.exp(scores)
    result: Floats = weights / weights.sum()
    return result
