"""How well the model predicts given tokens: a text's likelihood in windows that slide over it, and that of choices.

Works on token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.cache import Cache
from ortgpt.call import Logits
from ortgpt.engine import Engine
from ortgpt.errors import ContextLengthError, NonFiniteLogitsError, PromptError
from ortgpt.logprobs import TokenLogprob, log_softmax, token_logprob
from ortgpt.option_checks import read_integer

_PIECE = 128  # tokens of a prefill whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class Score:
    """The likelihood of a text: `nll` in nats, summed over `tokens`; `token_logprobs` in nats, one a token."""

    nll: float
    tokens: int
    text_bytes: int
    token_ids: list[int]
    token_logprobs: list[float]

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); infinite where that is beyond any float."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nll in bits, per byte of the text in UTF-8."""
        return self.nll / math.log(2) / self.text_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several continuations of a prompt: its place among them, and its log-likelihood in nats.

    `score` is what choices are ranked by: `logprob`, over the tokens or the bytes of the continuation where asked for.
    `probability` is its part of exp(score) among all choices.
    """

    index: int
    text: str
    score: float
    probability: float
    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]


def score_ids(
    engine: Engine, start_id: int, token_ids: Sequence[int], text_bytes: int, stride: int | None = None
) -> Score:
    """Score `token_ids`, the first predicted from `start_id`.

    Windows of n_positions move by `stride` tokens, by default half of it; each token is counted once, in the first
    window that reaches it. Raises PromptError when there is nothing to score, OptionError for a stride that skips
    tokens, NonFiniteLogitsError when the model computes NaN or infinity.
    """
    if not token_ids:
        raise PromptError("nothing to score: the text is empty (accepted: at least one token)")
    n_positions = engine.config.n_positions
    accepted = f"an integer from 1 to the context, {n_positions}"
    stride = read_integer("stride", stride, 1, accepted, n_positions) or max(1, n_positions // 2)
    ids = np.array([start_id, *token_ids], np.int64)
    logprobs = np.empty(len(token_ids))
    done = 0
    for begin in range(0, len(token_ids), stride):
        window = ids[begin : begin + n_positions]
        end = min(begin + len(window), len(token_ids))
        if end > done:
            cache = engine.new_cache(1, len(window))
            if done > begin:
                engine.prefill(cache, [window[: done - begin].tolist()])
            for place, logits in _pieces(engine, cache, window[done - begin : end - begin].tolist()):
                targets = ids[done + place + 1 : done + place + 1 + len(logits)]
                logprobs[done + place : done + place + len(logits)] = _of(logits, targets)
            done = end
        if done == len(token_ids):
            break
    return Score(
        nll=float(-logprobs.sum()),
        tokens=len(token_ids),
        text_bytes=text_bytes,
        token_ids=list(token_ids),
        token_logprobs=logprobs.tolist(),
    )


def prompt_logprobs(engine: Engine, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Say how likely each token of a prompt was behind those before it, and which `count` tokens were most likely.

    The first is predicted by nothing. Raises ContextLengthError for a prompt beyond the context.
    """
    ids = list(token_ids)
    if len(ids) > engine.config.n_positions:
        raise ContextLengthError(
            f"echo: a prompt of {len(ids)} tokens exceeds the context of {engine.config.n_positions} tokens"
        )
    found = [TokenLogprob(token_id=ids[0], logprob=None, top=[])]
    cache = engine.new_cache(1, len(ids))
    for place, logits in _pieces(engine, cache, ids[:-1]):
        found += [token_logprob(row, token_id, count) for row, token_id in zip(logits, ids[place + 1 :], strict=False)]
    return found


def continuation_logprobs(
    engine: Engine, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the log-probabilities, in nats, of the tokens of each continuation; the prompt is computed once.

    Raises ContextLengthError where prompt and continuation do not fit.
    """
    longest = max(map(len, continuations))
    if len(prompt_ids) + longest > engine.config.n_positions:
        raise ContextLengthError(
            f"a prompt of {len(prompt_ids)} tokens and a continuation of {longest} exceed the context of "
            f"{engine.config.n_positions} tokens"
        )
    cache = engine.new_cache(1, len(prompt_ids) + longest)
    after_prompt = _checked(engine, engine.prefill(cache, [prompt_ids])[0])
    found = []
    for ids in continuations:
        cache.rewind(len(prompt_ids))
        parts = [_of(after_prompt, np.array(ids[:1]))]
        for place, logits in _pieces(engine, cache, ids[:-1]):
            parts.append(_of(logits, np.array(ids[place + 1 : place + 1 + len(logits)])))
        found.append(np.concatenate(parts).tolist())
    return found


def _pieces(engine: Engine, cache: Cache, ids: Sequence[int]) -> Iterator[tuple[int, Logits]]:
    """Append `ids` to a cache of one row; yield places and the logits (tokens, allowed_vocab_size) from there on."""
    for place in range(0, len(ids), _PIECE):
        piece = ids[place : place + _PIECE]
        yield place, _checked(engine, engine.prefill(cache, [piece], np.arange(len(piece))[None])[0])


def _checked(engine: Engine, logits: Logits) -> Logits:
    if not np.isfinite(logits).all():
        raise NonFiniteLogitsError("the model computed non-finite logits; its weights are damaged or overflow")
    return logits[:, : engine.allowed_vocab_size]


def _of(logits: Logits, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the log-probability of each target by the logits of its row."""
    found: npt.NDArray[np.float64] = log_softmax(logits)[np.arange(len(targets)), targets]
    return found
