"""How much a quantised graph differs from the float32 graph it was made of: predictions, independence, speed.

Both are run as the runtime runs them, on the same token ids. Knows no recipe and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.engine.engine import Engine
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.verify import Logits

SAMPLED_TOKENS = 2048
_ROWS, _ROW_TOKENS = 16, 128
_PIECE = 64  # positions whose logits are held at once
_TOP = 5
_INDEPENDENCE_ROWS, _INDEPENDENCE_TOKENS = 8, 128
_STRANGE_TOKENS = 64
_SPEED_PROMPT, _SPEED_STEPS, _SPEED_RUNS = 128, 32, 5

Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Two graphs' predictions of the same `tokens`: nll in nats, summed; mean divergence; agreement as fractions.

    `kl` is KL(float32 ‖ quantised) in nats; `top5` the part of the five best of the one that are among those of the
    other.
    """

    tokens: int
    nll: float
    baseline_nll: float
    kl: float
    top1: float
    top5: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.tokens))

    @property
    def baseline_perplexity(self) -> float:
        return float(np.exp(self.baseline_nll / self.tokens))

    @property
    def perplexity_ratio(self) -> float:
        return float(np.exp((self.nll - self.baseline_nll) / self.tokens))


def compare(
    baseline: Engine, candidate: Engine, rows: Sequence[Ids], *, on_row: Callable[[], None] = lambda: None
) -> Divergence:
    """Let both predict every id of `rows` but the first of each."""
    sums = np.zeros(5)
    for ids in rows:
        for expected, found, targets in _predictions(baseline, candidate, ids):
            if not np.isfinite(expected).all():
                raise ExportError("the float32 bundle computes NaN or infinity; its weights are damaged or too large")
            sums += _differences(_log_softmax(expected), _log_softmax(found), targets)
        on_row()
    tokens = sum(len(ids) - 1 for ids in rows)
    baseline_nll, nll, kl, top1, top5 = sums.tolist()
    return Divergence(
        tokens=tokens, nll=nll, baseline_nll=baseline_nll, kl=kl / tokens, top1=top1 / tokens, top5=top5 / tokens
    )


def _predictions(
    baseline: Engine, candidate: Engine, ids: Ids
) -> Iterator[tuple[Logits, Logits, npt.NDArray[np.int64]]]:
    caches = [engine.new_cache(1, len(ids)) for engine in (baseline, candidate)]
    for begin in range(0, len(ids) - 1, _PIECE):
        piece = ids[begin : min(begin + _PIECE, len(ids) - 1)]
        places = np.arange(len(piece))[None]
        expected, found = (
            engine.prefill(cache, [piece], places)[0][:, : engine.allowed_vocab_size]
            for engine, cache in zip((baseline, candidate), caches, strict=True)
        )
        yield expected, found, np.array(ids[begin + 1 : begin + 1 + len(piece)])


def _differences(expected: Logits, found: Logits, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    rows = np.arange(len(targets))
    best, other = (np.argpartition(values, -_TOP, axis=1)[:, -_TOP:] for values in (expected, found))
    shared = (best[:, :, None] == other[:, None, :]).any(2).mean(1)
    return np.array(
        [
            -expected[rows, targets].sum(dtype=np.float64),
            -found[rows, targets].sum(dtype=np.float64),
            (np.exp(expected) * (expected - found)).sum(dtype=np.float64),
            (expected.argmax(1) == found.argmax(1)).sum(),
            shared.sum(),
        ]
    )


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Logits = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
