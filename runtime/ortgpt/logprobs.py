"""How likely the model held each token: log-probabilities of what was picked, and of what else was likely.

They are the model's own, in nats: before temperature, penalties and whatever else the options do to the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.sampling import Floats, largest


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token and its log-probability; `top` has the most likely ones, (id, log-probability), most likely first.

    `logprob` is None for a prompt's first token, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Return log-probabilities (..., vocab_size) in float64."""
    wide: npt.NDArray[np.float64] = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def token_logprob(logits: Floats, token_id: int, count: int) -> TokenLogprob:
    """Say how likely `token_id` was by logits (vocab_size,), and which `count` tokens were most likely."""
    logprobs = log_softmax(logits)
    top = largest(logits, min(count, logits.size))[:count].tolist() if count else []
    return TokenLogprob(
        token_id=int(token_id),
        logprob=float(logprobs[token_id]),
        top=[(each, float(logprobs[each])) for each in top],
    )
