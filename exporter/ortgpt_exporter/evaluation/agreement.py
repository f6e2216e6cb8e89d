"""Compare the labels of a quantised classifier with those of the float32 classifier it was made from.

Both run as the runtime runs them, on the same texts. Knows no recipe and writes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.manifest import Promise
from ortgpt.classifier import Classifier
from ortgpt.contract import ProblemType
from ortgpt.engine.forward import Logits
from ortgpt.sampling.logprobs import log_softmax
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.verify import require_finite, rounded

_ROWS, _MAX_TOKENS = 64, 128
_SPEED_TOKENS, _SPEED_RUNS = 128, 5
_SEED = 20190214


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two classifiers label the same texts or tokens."""

    labelled: int
    """How many texts, or tokens, got labels."""
    kl: float | None
    """KL(float32 ‖ quantised) of the probabilities, in nats, the mean over them; None for a regression."""
    same_labels: float | None
    """The fraction of them that got the same labels; None for a regression."""
    max_abs_diff: float
    """The largest difference of two logits."""
    logit_range: float
    """The largest logit of float32 less the smallest."""


def random_rows(classifier: Classifier) -> list[Ids]:
    """Return 64 rows of random tokens, of 1 to 128 tokens, or fewer if the context is shorter."""
    config = classifier.bundle.config
    random = np.random.default_rng(_SEED)
    vocab_size = config.vocab_size - classifier.bundle.manifest.masked_tokens
    lengths = np.linspace(1, min(_MAX_TOKENS, config.n_positions), _ROWS).astype(int)
    return [random.integers(vocab_size, size=length).tolist() for length in lengths]


def compare_labels(
    baseline: Classifier, candidate: Classifier, rows: Sequence[Ids], *, on_row: Callable[[], None] = lambda: None
) -> Difference:
    """Let both classifiers label each row alone; `on_row` is called after each row.

    If the quantised classifier computes NaN or infinity, the differences are not finite. Raises ExportError if the
    float32 classifier computes them.
    """
    pairs = []
    for ids in rows:
        expected, logits = (np.atleast_2d(each.logits([ids])[0]) for each in (baseline, candidate))
        require_finite(expected, "the float32 bundle")
        pairs.append((expected, logits))
        on_row()
    assert baseline.bundle.labels is not None
    expected, logits = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    kl, same = _divergence(expected, logits, baseline.bundle.labels.problem_type)
    return Difference(
        labelled=len(expected),
        kl=kl,
        same_labels=same,
        max_abs_diff=float(np.abs(logits - expected).max()),
        logit_range=float(expected.max() - expected.min()),
    )


def _divergence(expected: Logits, logits: Logits, problem_type: str) -> tuple[float | None, float | None]:
    """Return the mean KL divergence over rows of logits (rows, labels), and the fraction with the same labels."""
    if problem_type == ProblemType.REGRESSION:
        return None, None
    with np.errstate(invalid="ignore"):  # of logits that are not finite
        if problem_type == ProblemType.SINGLE_LABEL:
            theirs, ours = log_softmax(expected), log_softmax(logits)
            kl = (np.exp(theirs) * (theirs - ours)).sum(-1, dtype=np.float64)
            return float(kl.mean()), float((expected.argmax(-1) == logits.argmax(-1)).mean())
        # Each label holds or not: a distribution of its own.
        kl = (_bernoulli(expected, logits) + _bernoulli(-expected, -logits)).sum(-1)
        return float(kl.mean()), float(((expected >= 0) == (logits >= 0)).all(-1).mean())


def _bernoulli(expected: Logits, logits: Logits) -> npt.NDArray[np.float64]:
    """Return p (log p - log q) for the probabilities whose logits these are."""
    theirs, ours = (-np.logaddexp(0, -each.astype(np.float64)) for each in (expected, logits))
    part: npt.NDArray[np.float64] = np.exp(theirs) * (theirs - ours)
    return part


def measure_batch_changes(classifier: Classifier, rows: Sequence[Ids], kind: str) -> Promise:
    """Compute the same rows alone and in one batch; return the changes as a promise of `kind`."""
    alone = np.concatenate([np.atleast_2d(classifier.logits([ids])[0]) for ids in rows])
    whole = len(rows) * (classifier.bundle.config.n_positions + 1)
    together = np.concatenate([np.atleast_2d(each) for each in classifier.logits(rows, batch_tokens=whole)])
    return Promise(
        kind=kind,
        logit_bound=rounded(float(np.abs(together - alone).max())),
        argmax_changes_in_batch=rounded(float(1000 * (together.argmax(-1) != alone.argmax(-1)).mean())),
    )


def measure_text_speed(classifiers: Sequence[Classifier]) -> list[float]:
    """Return the tokens per second of each on a text of 128 tokens, or of the context: medians, timed in turn."""
    length = min(_SPEED_TOKENS, classifiers[0].bundle.config.n_positions)
    ids = [0] * length
    times: list[list[float]] = [[] for _ in classifiers]
    for _ in range(_SPEED_RUNS + 1):
        for classifier, seconds in zip(classifiers, times, strict=True):
            started = time.perf_counter()
            classifier.logits([ids])
            seconds.append(time.perf_counter() - started)
    return [rounded(length / statistics.median(seconds[1:])) for seconds in times]
