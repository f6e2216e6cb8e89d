"""How well the model predicts a given text: log-likelihood in windows that slide over it. Works on token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.engine import Engine
from ortgpt.errors import NonFiniteLogitsError, PromptError

_PIECE = 128  # tokens of a prefill whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class Score:
    """The likelihood of a text: `nll` in nats, summed over `tokens`; `token_logprobs` in nats, one a token."""

    nll: float
    tokens: int
    text_bytes: int
    token_logprobs: list[float]

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """nll in bits, per byte of the text in UTF-8."""
        return self.nll / math.log(2) / self.text_bytes


def score_ids(engine: Engine, start_id: int, token_ids: Sequence[int], text_bytes: int) -> Score:
    """Score `token_ids`, the first predicted from `start_id`.

    Windows of n_positions move by half of it; each token is counted once, in the first window that reaches it. Raises
    PromptError when there is nothing to score, NonFiniteLogitsError when the model computes NaN or infinity.
    """
    if not token_ids:
        raise PromptError("nothing to score: the text is empty (accepted: at least one token)")
    n_positions = engine.config.n_positions
    ids = np.array([start_id, *token_ids], np.int64)
    logprobs = np.empty(len(token_ids))
    stride = max(1, n_positions // 2)
    done = 0
    for begin in range(0, len(token_ids), stride):
        window = ids[begin : begin + n_positions]
        end = min(begin + len(window), len(token_ids))
        if end > done:
            logprobs[done:end] = _window(engine, window, ids[done + 1 : end + 1], done - begin)
            done = end
        if done == len(token_ids):
            break
    return Score(
        nll=float(-logprobs.sum()), tokens=len(token_ids), text_bytes=text_bytes, token_logprobs=logprobs.tolist()
    )


def _window(
    engine: Engine, inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], first: int
) -> npt.NDArray[np.float64]:
    """Return the log-probabilities of `targets`, which follow inputs[first], inputs[first + 1] and so on."""
    cache = engine.new_cache(1, len(inputs))
    if first:
        engine.prefill(cache, [inputs[:first].tolist()])
    parts = []
    for start in range(0, len(targets), _PIECE):
        wanted = targets[start : start + _PIECE]
        piece = inputs[first + start : first + start + len(wanted)]
        logits = engine.prefill(cache, [piece.tolist()], np.arange(len(piece))[None])[0]  # (piece, vocab_size)
        if not np.isfinite(logits).all():
            raise NonFiniteLogitsError("the model computed non-finite logits; its weights are damaged or overflow")
        logits = logits[:, : engine.allowed_vocab_size].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(wanted)), wanted]
        parts.append(chosen - np.log(np.exp(logits).sum(axis=1)))
    return np.concatenate(parts)
