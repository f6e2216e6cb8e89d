"""How a quantised graph's logits move when a token is computed otherwise than alone and one a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortgpt.engine.engine import Engine
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.verify import Logits, rounded

_INDEPENDENCE_ROWS, _INDEPENDENCE_TOKENS = 8, 128
_STRANGE_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class BatchEffects:
    """How far logits move when the same token is computed otherwise, and how many winners change per 1,000 tokens."""

    logit_bound: float
    batch_flips: float
    outlier_flips: float
    piece_flips: float
    step_flips: float


def measure_batch_effects(engine: Engine, rows: Sequence[Ids]) -> BatchEffects:
    """Compute the same tokens alone, one a step, and otherwise, and compare.

    Otherwise is in a batch, beside a row of outliers, in a whole prefill, and four a step.
    """
    cut = [list(ids[: _INDEPENDENCE_TOKENS + 1]) for ids in rows[:_INDEPENDENCE_ROWS]]
    length = min(map(len, cut))
    texts = [ids[:length] for ids in cut]
    outliers = [_strangest_id(engine)] * length
    places = np.arange(length)[None]
    alone = np.stack([_stepwise(engine, [ids], 1)[0] for ids in texts])
    moved = 0.0

    def flips(other: Logits) -> float:
        nonlocal moved
        moved = max(moved, float(np.abs(other - alone).max()))
        return rounded(float(1000 * (other.argmax(-1) != alone.argmax(-1)).mean()))

    found = {
        "batch_flips": flips(_stepwise(engine, texts, 1)),
        "outlier_flips": flips(np.stack([_stepwise(engine, [ids, outliers], 1)[0] for ids in texts])),
        "piece_flips": flips(
            np.stack([engine.prefill(engine.new_cache(1, length), [ids], places)[0] for ids in texts])
        ),
        "step_flips": flips(np.stack([_stepwise(engine, [ids], 4)[0] for ids in texts])),
    }
    return BatchEffects(logit_bound=rounded(moved), **found)


def _strangest_id(engine: Engine) -> int:
    """Return, of tokens spread over the vocabulary, the one whose logits are largest: it drives activations far."""
    count = min(_STRANGE_TOKENS, engine.allowed_vocab_size)
    ids = [index * engine.allowed_vocab_size // count for index in range(count)]
    logits = np.concatenate([engine.prefill(engine.new_cache(1, 1), [[token_id]])[:, 0] for token_id in ids])
    return ids[int(np.abs(logits).max(axis=1).argmax())]


def _stepwise(engine: Engine, texts: Sequence[Ids], width: int) -> Logits:
    """Return the logits (rows, positions, vocab_size) of texts of one length, fed `width` tokens a step."""
    length = len(texts[0])
    cache = engine.new_cache(len(texts), length)
    found = []
    for begin in range(0, length, width):
        pieces = [ids[begin : begin + width] for ids in texts]
        places = np.tile(np.arange(len(pieces[0])), (len(texts), 1))
        found.append(engine.prefill(cache, pieces, places).copy())
    result: Logits = np.concatenate(found, axis=1)
    return result
