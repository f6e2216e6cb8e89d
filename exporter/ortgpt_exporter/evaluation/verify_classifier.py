"""Compare the opened graph of a classifier with the PyTorch network it came from, the way the runtime will use it.

The reference is always PyTorch's computation of one text alone, without padding or batch. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ortgpt.bundle.manifest import Check
from ortgpt.classifier import Classifier
from ortgpt.engine.forward import Logits
from ortgpt_exporter.evaluation.verify import (
    SEED,
    TOLERANCES,
    compare_logits,
    prefill_lengths,
    require_finite,
)
from ortgpt_models import GPTClassifier


def classifier_check_count(n_positions: int) -> int:
    """Return how many checks verify_classifier() runs on a network with this context."""
    return len(prefill_lengths(n_positions)) + 1


def verify_classifier(
    classifier: Classifier, network: GPTClassifier, dtype: str, *, on_check: Callable[[str], None] = lambda name: None
) -> tuple[Check, ...]:
    """Run every check on a graph that computes in `dtype`; `on_check` gets the name of each before it runs.

    The checks are texts of 1, 2 and 17 tokens and of the full context, each alone; and all of them in one ragged batch.
    Lengths beyond the context are cut to it. Raises ExportError if the network itself computes NaN or infinity.
    """
    config = classifier.bundle.config
    random = np.random.default_rng(SEED)
    vocab_size = config.vocab_size - classifier.bundle.manifest.masked_tokens
    texts = [random.integers(vocab_size, size=length).tolist() for length in prefill_lengths(config.n_positions)]
    expected = [_oracle(network, ids) for ids in texts]
    plans = [(f"a text of {len(ids)}", [ids], [logits]) for ids, logits in zip(texts, expected, strict=True)]
    checks = []
    for name, rows, all_expected in (*plans, ("ragged batch", texts, expected)):
        on_check(name)
        checks.append(compare_logits(name, _pairs(classifier, rows, all_expected), TOLERANCES[dtype]))
    return tuple(checks)


def _pairs(
    classifier: Classifier, rows: Sequence[Sequence[int]], expected: Sequence[Logits]
) -> Iterator[tuple[Logits, Logits]]:
    whole_batch = len(rows) * (classifier.bundle.config.n_positions + 1)
    for theirs, ours in zip(expected, classifier.logits(rows, batch_tokens=whole_batch), strict=True):
        yield theirs, np.atleast_2d(ours)


@torch.no_grad()
def _oracle(network: GPTClassifier, ids: Sequence[int]) -> Logits:
    """Return PyTorch's logits of one text, (1, num_labels) of the last token or (tokens, num_labels)."""
    logits: Logits = network(torch.tensor([ids]))[0].numpy()
    require_finite(logits, "the network itself")
    return logits if network.config.labels_tokens else logits[-1:]
