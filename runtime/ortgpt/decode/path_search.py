"""Search the likeliest sequence of tokens that is complete, the likeliest first: so the first complete one is the best.

What completes a sequence, the caller says; knows no text.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.decode.next_token import check_finite
from ortgpt.engine.engine import Engine
from ortgpt.engine.kv_cache import Cache
from ortgpt.sampling.logprobs import log_softmax
from ortgpt.sampling.warpers import largest

Mask = npt.NDArray[np.bool_]  # (allowed_vocab_size,)


@dataclass(frozen=True, kw_only=True)
class PathRules:
    """Which sequences are searched, and which of them are complete."""

    begins: Mask
    """The tokens that may come first."""
    continues: Mask
    """The tokens that may follow."""
    ends: Mask
    """The tokens of which one has to follow a complete sequence."""
    may_continue: Callable[[Sequence[int]], bool]
    """Whether a sequence may become longer."""
    may_end: Callable[[Sequence[int]], bool]
    """Whether a sequence may be complete."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """A complete sequence, and how likely it is."""

    token_ids: list[int]
    logprob: float
    """The log-probability, in nats, of its tokens and that one of the tokens that end it follows."""
    is_likeliest: bool
    """Whether no other complete sequence is likelier; False if the search ended before that was certain."""


def likeliest_path(
    engine: Engine, prompt_ids: Sequence[int], rules: PathRules, *, max_tokens: int, max_steps: int
) -> Path | None:
    """Return the likeliest complete sequence of at most `max_tokens` after a prompt; None if none was found.

    A sequence only loses probability as it grows, so the likeliest unfinished one is extended first, and a complete one
    that is likelier than all unfinished ones is the answer. After `max_steps` sequences were extended, the likeliest
    complete one so far is. Raises NonFiniteLogitsError; prompt and `max_tokens` have to fit the context.
    """
    return _Search(engine, prompt_ids, rules, max_tokens, max_steps).run()


@dataclass(frozen=True)
class _Siblings:
    """The extensions of one sequence by one token, the likeliest first: as many as the search can reach."""

    token_ids: tuple[int, ...]
    """The sequence."""
    logprobs: npt.NDArray[np.float64]
    """Those of the extended sequences, in falling order."""
    order: npt.NDArray[np.int64]
    """The tokens that extend it, in that order."""


class _Search:
    def __init__(
        self, engine: Engine, prompt_ids: Sequence[int], rules: PathRules, max_tokens: int, max_steps: int
    ) -> None:
        self._engine = engine
        self._rules = rules
        self._max_tokens = max_tokens
        self._max_steps = max_steps
        self._prompt_tokens = len(prompt_ids)
        self._cache: Cache = engine.new_cache(1, len(prompt_ids) + max_tokens)
        self._open: list[tuple[float, int, _Siblings, int]] = []  # a heap: -logprob, a number, siblings, place
        self._pushed = 0
        self._best: tuple[float, tuple[int, ...]] | None = None
        self._branch((), self._logprobs(prompt_ids), rules.begins)

    def run(self) -> Path | None:
        for _ in range(self._max_steps):
            if not self._open or (self._best is not None and self._best[0] >= -self._open[0][0]):
                return self._found(is_likeliest=True)
            logprob, _, siblings, place = heapq.heappop(self._open)
            self._push(siblings, place + 1)
            self._extend((*siblings.token_ids, int(siblings.order[place])), -logprob)
        return self._found(is_likeliest=not self._open)

    def _found(self, *, is_likeliest: bool) -> Path | None:
        if self._best is None:
            return None
        return Path(token_ids=list(self._best[1]), logprob=self._best[0], is_likeliest=is_likeliest)

    def _extend(self, token_ids: tuple[int, ...], logprob: float) -> None:
        """Compute what follows a sequence: how likely it ends here, and what extends it."""
        may_end = self._rules.may_end(token_ids)
        may_continue = len(token_ids) < self._max_tokens and self._rules.may_continue(token_ids)
        if not may_end and not may_continue:
            return
        self._cache.crop(self._prompt_tokens)
        logprobs = logprob + self._logprobs(token_ids)
        if may_end:
            whole = _log_sum(logprobs[self._rules.ends])
            if whole > (-math.inf if self._best is None else self._best[0]):
                self._best = whole, token_ids
        if may_continue:
            self._branch(token_ids, logprobs, self._rules.continues)

    def _branch(self, token_ids: tuple[int, ...], logprobs: npt.NDArray[np.float64], allowed: Mask) -> None:
        tokens = np.flatnonzero(allowed)
        if not len(tokens):
            return
        order = tokens[largest(logprobs[tokens], self._max_steps)[: self._max_steps]]
        self._push(_Siblings(token_ids, logprobs[order], order), 0)

    def _push(self, siblings: _Siblings, place: int) -> None:
        """Add one of the siblings to what is open; those after it are less likely, and wait until it was extended."""
        if place < len(siblings.order):
            self._pushed += 1
            heapq.heappush(self._open, (-float(siblings.logprobs[place]), self._pushed, siblings, place))

    def _logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Append tokens to the cache; return the log-probabilities of the next one."""
        logits = self._engine.prefill(self._cache, [token_ids])[0, -1]
        check_finite(logits, "in the search of a word")
        logprobs: npt.NDArray[np.float64] = log_softmax(logits[: self._engine.allowed_vocab_size].astype(np.float64))
        return logprobs


def _log_sum(logprobs: npt.NDArray[np.float64]) -> float:
    if not len(logprobs):
        return -math.inf
    largest = float(logprobs.max())
    return largest + math.log(float(np.exp(logprobs - largest).sum()))
