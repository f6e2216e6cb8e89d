"""Measure how logits move if tokens are computed in batches or pieces, and not alone, one per step. Knows no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ortgpt.bundle.manifest import Promise
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Logits
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.verify import rounded

_ROWS, _ROW_TOKENS = 8, 128
_OUTLIER_CANDIDATES = 64


def measure_batch_effects(engine: Engine, rows: Sequence[Ids], kind: str) -> Promise:
    """Compute the same tokens alone, one per step, and in four other ways; return the changes as a promise of `kind`.

    Of the rows, the first 8 are used, each cut to the length of the shortest and to 129 tokens.
    """
    cut = [list(ids[: _ROW_TOKENS + 1]) for ids in rows[:_ROWS]]
    length = min(map(len, cut))
    texts = [ids[:length] for ids in cut]
    alone = np.stack([_stepwise(engine, [ids], 1)[0] for ids in texts])
    largest_change, changes = 0.0, []
    for logits in _otherwise(engine, texts):
        largest_change = max(largest_change, float(np.abs(logits - alone).max()))
        changes.append(rounded(float(1000 * (logits.argmax(-1) != alone.argmax(-1)).mean())))
    in_batch, beside_outliers, in_prefill, in_steps_of_four = changes
    return Promise(
        kind=kind,
        logit_bound=rounded(largest_change),
        argmax_changes_in_batch=in_batch,
        argmax_changes_beside_outliers=beside_outliers,
        argmax_changes_in_prefill=in_prefill,
        argmax_changes_in_steps_of_four=in_steps_of_four,
    )


def _otherwise(engine: Engine, texts: Sequence[Ids]) -> Iterator[Logits]:
    """Yield the logits in a batch, beside a row of outliers, in a whole prefill, and in steps of four tokens."""
    length = len(texts[0])
    outliers = [_outlier_id(engine)] * length
    positions = np.arange(length)[None]
    yield _stepwise(engine, texts, 1)
    yield np.stack([_stepwise(engine, [ids, outliers], 1)[0] for ids in texts])
    yield np.stack([engine.prefill(engine.new_cache(1, length), [ids], positions)[0] for ids in texts])
    yield np.stack([_stepwise(engine, [ids], 4)[0] for ids in texts])


def _outlier_id(engine: Engine) -> int:
    """Return the id with the largest logits of 64 ids spread over the vocabulary: its activations are large, too."""
    count = min(_OUTLIER_CANDIDATES, engine.allowed_vocab_size)
    ids = [index * engine.allowed_vocab_size // count for index in range(count)]
    logits = np.concatenate([engine.prefill(engine.new_cache(1, 1), [[token_id]])[:, 0] for token_id in ids])
    return ids[int(np.abs(logits).max(axis=1).argmax())]


def _stepwise(engine: Engine, texts: Sequence[Ids], width: int) -> Logits:
    """Return the logits (rows, positions, vocab_size) of texts of equal length, fed `width` tokens per step."""
    length = len(texts[0])
    cache = engine.new_cache(len(texts), length)
    parts = []
    for begin in range(0, length, width):
        pieces = [ids[begin : begin + width] for ids in texts]
        positions = np.tile(np.arange(len(pieces[0])), (len(texts), 1))
        parts.append(engine.prefill(cache, pieces, positions).copy())
    logits: Logits = np.concatenate(parts, axis=1)
    return logits
