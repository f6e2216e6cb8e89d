"""Pure functions from logits to a token id, in the order and meaning of `transformers`' logits processors.

Randomness comes in as a numpy Generator. Knows no model, no text and no options object.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_NUCLEUS_GUESS = 1024  # a nucleus is nearly always smaller than this; a larger one costs a full sort


def penalize_repetition(logits: Floats, token_ids: Iterable[int], penalty: float) -> None:
    """Make every id in `token_ids` less likely (penalty > 1) in place: once, however often it occurs.

    Positive logits are divided by `penalty`, negative ones multiplied (Keskar et al. 2019, as `transformers` has it).
    """
    ids = np.fromiter(set(token_ids), np.int64)
    scores = logits[ids]
    logits[ids] = np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


def forbid(logits: Floats, token_ids: Iterable[int]) -> None:
    """Make the ids in `token_ids` impossible, in place."""
    logits[list(token_ids)] = -np.inf


def candidates(logits: Floats, *, temperature: float, top_k: int, top_p: float) -> tuple[Ids, Floats]:
    """Return the ids that may be drawn, most likely first, and their probabilities.

    Temperature, then the `top_k` largest (0: all; ties with the k-th stay), then the smallest set of the most likely
    ones whose probabilities reach `top_p`, at least one. `logits` is (vocab_size,) and stays as it is.
    """
    largest = logits.max()
    if top_k and top_k < logits.size:
        ids = np.flatnonzero(logits >= _kth_largest(logits, top_k))
    elif top_p < 1.0:
        return _nucleus_of_all(logits, largest, temperature, top_p)
    else:
        ids = np.arange(logits.size)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    probabilities = _softmax(logits[ids], largest, temperature)
    if top_p < 1.0:
        kept = _nucleus_size(probabilities, top_p)
        ids, probabilities = ids[:kept], probabilities[:kept] / probabilities[:kept].sum()
    possible = int(np.count_nonzero(probabilities))  # sorted: the impossible ones are last
    return ids[:possible], probabilities[:possible]


def draw(ids: Ids, probabilities: Floats, rng: np.random.Generator) -> int:
    """Draw one of `ids`, with one uniform number from `rng`."""
    cumulative = np.cumsum(probabilities, dtype=np.float64)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(ids[min(index, ids.size - 1)])  # the product may round up to the last sum


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


def _nucleus_of_all(logits: Floats, largest: np.float32, temperature: float, top_p: float) -> tuple[Ids, Floats]:
    """Return the nucleus of the whole vocabulary, sorting only as much of it as the nucleus may need."""
    probabilities = _softmax(logits, largest, temperature)
    count = min(_NUCLEUS_GUESS, probabilities.size)
    ids = np.argpartition(probabilities, probabilities.size - count)[probabilities.size - count :]
    if probabilities[ids].sum() < top_p:
        ids = np.arange(probabilities.size)
    ids = np.sort(ids)
    ids = ids[np.argsort(-probabilities[ids], kind="stable")]
    kept = ids[: _nucleus_size(probabilities[ids], top_p)]
    chosen = probabilities[kept]
    return kept, chosen / chosen.sum()


def _nucleus_size(probabilities: Floats, top_p: float) -> int:
    """Count the leading entries of a descending distribution that are needed to reach `top_p`, at least one."""
    reached = np.cumsum(probabilities[:-1], dtype=np.float64)
    return 1 + int(np.searchsorted(reached, top_p, side="left"))


def _softmax(logits: Floats, largest: np.float32, temperature: float) -> Floats:
    with np.errstate(over="ignore"):  # at a tiny temperature all but the largest go to -inf, as they should
        scores = (logits - largest) / max(np.float32(temperature), np.finfo(np.float32).tiny)
    weights = np.exp(scores)
    result: Floats = weights / weights.sum()
    return result
