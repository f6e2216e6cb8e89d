"""Compare the predictions of a quantised graph with those of the float32 graph it was made from.

Both run as the runtime runs them, on the same token ids. Knows no recipe and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Logits
from ortgpt.sampling.logprobs import log_softmax
from ortgpt.sampling.warpers import largest
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.verify import require_finite

_PIECE = 64  # positions whose logits are in memory at once
_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How two graphs predict the same tokens."""

    tokens: int
    """How many tokens were predicted."""
    nll: float
    """The negative log-likelihood of the quantised graph, summed over the tokens, in nats."""
    baseline_nll: float
    """The same of the float32 graph."""
    kl: float
    """KL(float32 ‖ quantised) in nats, the mean over the tokens."""
    top1: float
    """The fraction of tokens at which both have the same best token."""
    top5: float
    """The fraction of the five best tokens of one that are among the five best of the other."""

    @property
    def perplexity(self) -> float:
        """The perplexity of the quantised graph."""
        return float(np.exp(self.nll / self.tokens))

    @property
    def baseline_perplexity(self) -> float:
        """The perplexity of the float32 graph."""
        return float(np.exp(self.baseline_nll / self.tokens))

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity of the quantised graph in units of the float32 graph's."""
        return float(np.exp((self.nll - self.baseline_nll) / self.tokens))


def compare(
    baseline: Engine, candidate: Engine, rows: Sequence[Ids], *, on_row: Callable[[], None] = lambda: None
) -> Divergence:
    """Let both graphs predict every id of each row except the first; `on_row` is called after each row.

    If the quantised graph computes NaN or infinity, the perplexity or the KL divergence is not finite. Raises
    ExportError if the float32 graph computes them.
    """
    sums = np.zeros(5)
    for ids in rows:
        for expected, logits, targets in _predictions(baseline, candidate, ids):
            require_finite(expected, "the float32 bundle")
            with np.errstate(invalid="ignore"):  # of logits that are not finite
                sums += _differences(log_softmax(expected), log_softmax(logits), targets)
        on_row()
    tokens = sum(len(ids) - 1 for ids in rows)
    baseline_nll, nll, kl, top1, top5 = sums.tolist()
    return Divergence(
        tokens=tokens, nll=nll, baseline_nll=baseline_nll, kl=kl / tokens, top1=top1 / tokens, top5=top5 / tokens
    )


def _predictions(
    baseline: Engine, candidate: Engine, ids: Ids
) -> Iterator[tuple[Logits, Logits, npt.NDArray[np.int64]]]:
    """Yield logits (positions, vocab_size) of both graphs, and the ids that follow, one piece of a row at a time."""
    caches = [engine.new_cache(1, len(ids)) for engine in (baseline, candidate)]
    for begin in range(0, len(ids) - 1, _PIECE):
        piece = ids[begin : min(begin + _PIECE, len(ids) - 1)]
        positions = np.arange(len(piece))[None]
        expected, logits = (
            engine.prefill(cache, [piece], positions)[0][:, : engine.allowed_vocab_size]
            for engine, cache in zip((baseline, candidate), caches, strict=True)
        )
        yield expected, logits, np.array(ids[begin + 1 : begin + 1 + len(piece)])


def _differences(expected: Logits, logprobs: Logits, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the sums over positions of float32 nll, nll, KL, same best token, and shared five best tokens."""
    rows = np.arange(len(targets))
    best, other = (
        [set(largest(row, _TOP)[:_TOP].tolist()) for row in np.nan_to_num(values, nan=-np.inf)]
        for values in (expected, logprobs)
    )
    return np.array(
        [
            -expected[rows, targets].sum(dtype=np.float64),
            -logprobs[rows, targets].sum(dtype=np.float64),
            (np.exp(expected) * (expected - logprobs)).sum(dtype=np.float64),
            (expected.argmax(1) == logprobs.argmax(1)).sum(),
            sum(len(ids & other_ids) / _TOP for ids, other_ids in zip(best, other, strict=True)),
        ]
    )
