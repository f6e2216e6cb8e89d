"""How likely the model holds token ids: those of a text in windows, of a prompt, of continuations, of many pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.decode.next_token import check_finite
from ortgpt.engine.engine import CPU_BATCH_TOKENS, Engine
from ortgpt.engine.forward import Logits
from ortgpt.engine.kv_cache import Cache, RowKV
from ortgpt.engine.prefix_cache import FORWARD_TOKENS
from ortgpt.errors import ContextLengthError, PromptError
from ortgpt.options.validation import integer
from ortgpt.results import Score, TokenLogprob
from ortgpt.sampling.logprobs import log_softmax, token_logprob

Pair = tuple[Sequence[int], Sequence[int]]  # a context and what continues it, at least one id each
_Row = tuple[tuple[int, ...], int]  # the ids that a row of a batch computes, and how many of its last logits count

_PIECE = 128  # tokens of a prefill whose logits are held at once
_GPU_BATCH_TOKENS = 4096


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
    return [
        np.concatenate([_of(logits, targets) for logits, targets in parts]).tolist()
        for parts in _after_prompt(engine, prompt_ids, continuations)
    ]


@dataclass(frozen=True)
class Likelihood:
    """How likely a continuation is after its context."""

    logprob: float
    """Its log-likelihood in nats, the sum over its tokens."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one after those before it."""


def likelihoods(engine: Engine, pairs: Sequence[Pair]) -> Iterator[tuple[int, Likelihood]]:
    """Yield the index and the likelihood of each pair, in the order in which they are computed.

    A context that several pairs have is computed once where that takes less time; other pairs are computed together,
    padded on the right. A pair has at most n_positions + 1 tokens, since the last one is only predicted.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        groups.setdefault(tuple(context), []).append(index)
    rows: dict[_Row, list[int]] = {}
    for context, indices in groups.items():
        continuations = [pairs[index][1] for index in indices]
        if _shares_context(context, continuations):
            for index, parts in zip(indices, _after_prompt(engine, context, continuations), strict=True):
                yield index, _likelihood(parts)
        else:
            for index, ids in zip(indices, continuations, strict=True):
                rows.setdefault(((*context, *ids[:-1]), len(ids)), []).append(index)
    for batch in _batches(engine, list(rows)):
        for key, logits in zip(batch, _last_logits(engine, batch), strict=True):
            for index in rows[key]:
                yield index, _likelihood([(logits, np.array(pairs[index][1]))])


def cut_pair(context: Sequence[int], continuation: Sequence[int], n_positions: int) -> Pair:
    """Return a pair without the first tokens of its context, if they exceed what the model can see.

    Raises ContextLengthError for a continuation that leaves no room for a token before it.
    """
    if len(continuation) > n_positions:
        raise ContextLengthError(
            f"a continuation of {len(continuation)} tokens (accepted: at most the context of {n_positions} tokens)"
        )
    return context[-(n_positions + 1 - len(continuation)) :], continuation


def rolling_pairs(start_id: int, token_ids: Sequence[int], n_positions: int) -> list[Pair]:
    """Split a text into pairs that predict each of its tokens once, the first from `start_id`.

    Windows of n_positions tokens follow each other, each after one token. The last one has as many tokens as are left,
    and as long a context as fits. This is the rule of lm-evaluation-harness (get_rolling_token_windows), so that
    perplexities can be compared; score_ids() gives tokens more context.
    """
    ids = [start_id, *token_ids]
    pairs: list[Pair] = []
    for begin in range(0, len(token_ids), n_positions):
        end = min(begin + n_positions, len(token_ids))
        pairs.append((ids[max(0, end - n_positions) : begin + 1], ids[begin + 1 : end + 1]))
    return pairs


def _after_prompt(
    engine: Engine, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]]
) -> Iterator[Iterator[tuple[Logits, npt.NDArray[np.int64]]]]:
    """Yield the logits and targets of each continuation, in pieces; they are computed when they are taken."""
    cache = engine.new_cache(1, len(prompt_ids) + max(map(len, continuations)))
    after_prompt = _checked(engine, engine.prefill(cache, [prompt_ids])[0])

    def parts(ids: Sequence[int]) -> Iterator[tuple[Logits, npt.NDArray[np.int64]]]:
        cache.crop(len(prompt_ids))
        yield after_prompt, np.array(ids[:1])
        for place, logits in _pieces(engine, cache, ids[:-1]):
            yield logits, np.array(ids[place + 1 : place + 1 + len(logits)])

    for ids in continuations:
        yield parts(ids)


def _shares_context(context: Sequence[int], continuations: Sequence[Sequence[int]]) -> bool:
    """Tell whether continuations are computed sooner after one context than as rows that each have it.

    A continuation too long for a batch is always computed so.
    """
    after = {tuple(ids[:-1]) for ids in continuations}
    alone = len(context) + FORWARD_TOKENS + sum(len(ids) + FORWARD_TOKENS for ids in after if ids)
    rows = sum(len(context) + len(ids) for ids in after)
    return alone < rows or max(map(len, continuations)) > _PIECE


def _batches(engine: Engine, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Split rows into batches of similar lengths that one graph computes."""
    limit = CPU_BATCH_TOKENS if engine.session.device.is_cpu else _GPU_BATCH_TOKENS
    batch: list[_Row] = []
    most = 0
    for row in sorted(rows, key=lambda each: len(each[0])):
        size, most = len(batch) + 1, max(most, row[1])
        is_full = size * len(row[0]) > limit or size * most > _PIECE
        if batch and (is_full or not engine.takes_at_once([batch[0][0], row[0]])):
            yield batch
            batch, most = [], row[1]
        batch.append(row)
    if batch:
        yield batch


def _last_logits(engine: Engine, rows: Sequence[_Row]) -> Iterator[Logits]:
    """Compute rows together, and yield the logits of each row's last tokens, as many as it needs."""
    lengths = np.array([[len(ids)] for ids, _ in rows])
    counts = np.array([[count] for _, count in rows])
    positions = np.minimum(lengths - counts + np.arange(counts.max()), lengths - 1)
    cache = engine.new_cache(len(rows), int(lengths.max()))
    logits = engine.prefill(cache, [ids for ids, _ in rows], positions)
    for row, (_, count) in zip(logits, rows, strict=True):
        yield _checked(engine, row[:count])


def _likelihood(parts: Iterable[tuple[Logits, npt.NDArray[np.int64]]]) -> Likelihood:
    logprob, is_greedy = 0.0, True
    for logits, targets in parts:
        logprob += float(_of(logits, targets).sum())
        is_greedy = is_greedy and bool((logits.argmax(axis=-1) == targets).all())
    return Likelihood(logprob, is_greedy)


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
