"""How likely the model holds token ids: those of a text in sliding windows, of a prompt, of continuations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ortgpt.decode.next_token import check_finite
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Logits
from ortgpt.engine.kv_cache import Cache, RowKV
from ortgpt.errors import ContextLengthError, PromptError
from ortgpt.options.validation import integer
from ortgpt.results import Score, TokenLogprob
from ortgpt.sampling.logprobs import log_softmax, token_logprob

_PIECE = 128  # tokens of a prefill whose logits are held at once


def score_ids(
    engine: Engine, start_id: int, token_ids: Sequence[int], text_bytes: int, stride: int | None = None
) -> Score:
    """Score `token_ids`, the first predicted from `start_id`.

    Windows of n_positions move by `stride` tokens, by default half of it; each token is counted once, in the first
    window that reaches it. Raises PromptError when there is nothing to score, OptionError for a stride that skips
    tokens, NonFiniteLogitsError when the model computes NaN or infinity.
    """
    if not token_ids:
        raise PromptError(
            "nothing to score: the text is empty (accepted: at least one token, or two for a model without a token to "
            "start from)"
        )
    n_positions = engine.config.n_positions
    accepted = f"an integer from 1 to the context, {n_positions}"
    stride = integer(1, n_positions, accepted=accepted).read("stride", stride) or max(1, n_positions // 2)
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


def prompt_logprobs(engine: Engine, token_ids: Sequence[int], count: int) -> tuple[list[TokenLogprob], RowKV]:
    """Return the log-probability of each token of a prompt after those before it, with the `count` most likely tokens.

    Nothing predicts the first token. Also returns the keys and values of all tokens but the last, so that generating
    after the prompt computes it once. Raises ContextLengthError for a prompt beyond the context.
    """
    ids = list(token_ids)
    if len(ids) > engine.config.n_positions:
        raise ContextLengthError(
            f"echo: a prompt of {len(ids)} tokens exceeds the context of {engine.config.n_positions} tokens"
        )
    logprobs = [TokenLogprob(token_id=ids[0], logprob=None, top=[])]
    cache = engine.new_cache(1, len(ids))
    for place, logits in _pieces(engine, cache, ids[:-1]):
        rows = zip(logits, ids[place + 1 :], strict=False)
        logprobs += [token_logprob(row, token_id, count) for row, token_id in rows]
    return logprobs, cache.read_row(0)


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
        cache.crop(len(prompt_ids))
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
    check_finite(logits, "when a text is scored")
    return logits[:, : engine.allowed_vocab_size]


def _of(logits: Logits, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the log-probability of each target by the logits of its row."""
    logprobs: npt.NDArray[np.float64] = log_softmax(logits.astype(np.float64))[np.arange(len(targets)), targets]
    return logprobs
