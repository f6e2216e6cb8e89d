"""The model's own log-probabilities in nats, before temperature, penalties and other options change the logits."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ortgpt.results import TokenLogprob
from ortgpt.sampling.warpers import Floats, largest

Floating = TypeVar("Floating", bound="np.floating[Any]")


def log_softmax(logits: npt.NDArray[Floating]) -> npt.NDArray[Floating]:
    """Return log-probabilities (..., vocab_size), computed in the type of the logits."""
    shifted: npt.NDArray[Floating] = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprob(logits: Floats, token_id: int, count: int) -> TokenLogprob:
    """Return the log-probability of `token_id` by logits (vocab_size,), and the `count` most likely tokens."""
    logprobs = log_softmax(logits.astype(np.float64))
    top = largest(logits, min(count, logits.size))[:count].tolist() if count else []
    return TokenLogprob(
        token_id=int(token_id),
        logprob=float(logprobs[token_id]),
        top=[(each, float(logprobs[each])) for each in top],
    )
