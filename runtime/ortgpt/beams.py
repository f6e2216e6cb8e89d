"""Beam search: several beginnings of a continuation go on side by side, and the likeliest whole ones are kept.

Follows `transformers`' beam search step by step, in float32 as it does, so that scores and order are its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ortgpt.errors import NonFiniteLogitsError, OptionError
from ortgpt.picker import NOTHING_LEFT
from ortgpt.processors import make_processors
from ortgpt.resolved import ResolvedOptions
from ortgpt.rows import Timings

if TYPE_CHECKING:
    from ortgpt.engine import Engine

_OUT = np.float32(-1e9)  # added to the score of what may not be taken

Scores = npt.NDArray[np.float32]
Ends = Callable[[Sequence[int]], bool]  # whether ids generated so far end a text, by a stop string


@dataclass(frozen=True)
class Beam:
    """A continuation and its score: its log-probability over its length to the power of the length penalty."""

    token_ids: list[int]
    score: float


def search_beams(
    engine: Engine,
    options: ResolvedOptions,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    ends: Ends,
    timings: Timings,
) -> Iterator[list[Beam]]:
    """Search; yield the best `num_return_sequences` after each step, best first, the last of them being the answer.

    Raises NonFiniteLogitsError when the model computes NaN or infinity, OptionError when the options leave no token.
    """
    started = time.perf_counter()
    search = _Search(engine, options, prompt_ids, max_new_tokens, ends)
    logits = search.prefill()
    timings.prefill_s = time.perf_counter() - started
    going = True
    while going:
        going = search.step(logits)
        timings.decode_s = time.perf_counter() - started - timings.prefill_s
        yield search.best(options.num_return_sequences, running=going)
        if going:
            logits = search.feed()


class _Search:
    def __init__(
        self, engine: Engine, options: ResolvedOptions, prompt_ids: Sequence[int], max_new_tokens: int, ends: Ends
    ) -> None:
        self._engine = engine
        self._options = options
        self._prompt = list(prompt_ids)
        self._most = max_new_tokens
        self._ends = ends
        count = options.num_beams
        self._running: list[list[int]] = [[] for _ in range(count)]
        self._running_scores = np.full(count, _OUT, np.float32)
        self._running_scores[0] = 0.0
        self._done: list[list[int]] = [[] for _ in range(count)]
        self._done_scores = np.full(count, _OUT, np.float32)
        self._is_done = np.zeros(count, bool)
        self._improvable = True
        self._cache = engine.new_cache(1, len(prompt_ids) + max_new_tokens - 1, room=count)

    def prefill(self) -> Scores:
        """Compute the prompt once, for all beams."""
        logits = self._engine.prefill(self._cache, [self._prompt])[0]
        self._cache.arrange([0] * self._options.num_beams)
        self._call = self._engine.new_call(self._cache)
        return np.repeat(logits, self._options.num_beams, axis=0)

    def feed(self) -> Scores:
        """Compute the newest token of each beam."""
        for row, ids in enumerate(self._running):
            self._call.input_ids[row, 0] = ids[-1]
        self._call.run(self._cache.lengths + np.int32(1))
        found: Scores = self._call.logits()[:, 0]
        return found

    def step(self, logits: Scores) -> bool:
        """Go on with the likeliest continuations of all beams; tell whether the search does."""
        options, count = self._options, self._options.num_beams
        scores = self._log_probabilities(logits) + self._running_scores[:, None]
        kept = max(2, 1 + len(options.eos_token_ids)) * count
        order = _largest(scores.reshape(-1), kept)
        top_scores = scores.reshape(-1)[order]
        if top_scores[0] == -np.inf:
            raise OptionError(NOTHING_LEFT)
        parents, tokens = np.divmod(order, scores.shape[1])
        sequences = [[*self._running[p], int(t)] for p, t in zip(parents, tokens, strict=True)]
        length = len(sequences[0])
        ended = np.array(
            [length >= self._most or ids[-1] in options.eos_token_ids or self._ends(ids) for ids in sequences]
        )
        going_scores = top_scores + ended.astype(np.float32) * _OUT
        going = _largest(going_scores, count)
        self._finish(sequences, top_scores, ended, length)
        self._running = [sequences[index] for index in going]
        self._running_scores = going_scores[going]
        self._cache.arrange(parents[going].tolist())
        self._improvable = self._improvable and self._may_improve(length)
        open_beams = not (self._is_done.all() and options.early_stopping is True)
        return bool(self._improvable and open_beams and not ended.all())

    def _log_probabilities(self, logits: Scores) -> Scores:
        allowed = self._engine.allowed_vocab_size
        logits = logits[:, :allowed]
        if not np.isfinite(logits).all():
            raise NonFiniteLogitsError(
                f"{np.count_nonzero(~np.isfinite(logits))} logits of the beams are not finite at step "
                f"{len(self._running[0])}; the weights are damaged, or overflow in this precision"
            )
        shifted: Scores = logits - logits.max(axis=1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        for row, new_ids in zip(shifted, self._running, strict=True):
            ids = [*self._prompt, *new_ids]
            for processor in make_processors(self._options, self._prompt):
                processor(row, ids, len(self._prompt))
        return shifted

    def _finish(self, sequences: list[list[int]], scores: Scores, ended: npt.NDArray[np.bool_], length: int) -> None:
        """Keep the best whole continuations; only the first num_beams candidates count."""
        options, count = self._options, self._options.num_beams
        just_ended = ended & (np.arange(len(ended)) < count)
        scores = scores / np.float32(length**options.length_penalty)
        if self._is_done.all() and options.early_stopping is True:
            scores = scores + _OUT
        if not self._improvable:
            scores = scores + _OUT
        scores = scores + (~just_ended).astype(np.float32) * _OUT
        merged = np.concatenate((self._done_scores, scores))
        best = _largest(merged, count)
        both = [*self._done, *sequences]
        is_done = np.concatenate((self._is_done, just_ended))
        self._done, self._done_scores, self._is_done = [both[index] for index in best], merged[best], is_done[best]

    def _may_improve(self, length: int) -> bool:
        options = self._options
        reach = self._most if options.early_stopping == "never" and options.length_penalty > 0 else length
        possible = self._running_scores[0] / np.float32(reach**options.length_penalty)
        worst = np.where(self._is_done, self._done_scores.min(), _OUT)
        return bool((possible > worst).any())

    def best(self, count: int, *, running: bool) -> list[Beam]:
        """Return the best whole continuations, best first; while the search is running, what it has so far as well."""
        done = zip(self._done, self._done_scores, self._is_done, strict=True)
        found = [Beam(ids, float(score)) for ids, score, is_done in done if is_done or not running]
        if running:
            over = len(self._running[0]) ** self._options.length_penalty
            going = zip(self._running, self._running_scores, strict=True)
            found += [Beam(ids, float(score) / over) for ids, score in going]
            found.sort(key=lambda beam: -beam.score)
        return found[:count]


def _largest(values: Scores, count: int) -> npt.NDArray[np.int64]:
    """Return the places of the `count` largest values, largest first, the first among equals."""
    if count < values.size // 4:
        bound = np.partition(values, values.size - count)[values.size - count]
        places = np.flatnonzero(values >= bound)
        return places[np.argsort(-values[places], kind="stable")][:count]
    return np.argsort(-values, kind="stable")[:count]
