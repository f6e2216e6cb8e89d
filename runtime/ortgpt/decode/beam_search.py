"""Beam search: several continuations of a prompt are extended side by side, and the likeliest whole ones are kept.

Follows `transformers`' beam search step by step, in float32 as it does, so scores and order are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.decode.next_token import check_finite
from ortgpt.engine.engine import Engine
from ortgpt.errors import OptionError
from ortgpt.options.resolved import ResolvedOptions
from ortgpt.results import Timings
from ortgpt.sampling.logprobs import log_softmax
from ortgpt.sampling.processors import Processor, make_processors
from ortgpt.sampling.sampler import NOTHING_LEFT
from ortgpt.sampling.warpers import largest

_OUT = np.float32(-1e9)  # added to the score of a beam that may not be taken

Scores = npt.NDArray[np.float32]
Ends = Callable[[Sequence[int]], bool]  # whether the ids generated so far end in a stop string


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
    """Search; after each step yield the best `num_return_sequences` beams, best first. The last ones are the answer.

    Raises NonFiniteLogitsError when the model computes NaN or infinity, OptionError when the options leave no token.
    """
    started = time.perf_counter()
    search = _Search(engine, options, prompt_ids, max_new_tokens, ends)
    logits = search.prefill()
    timings.prefill_s = time.perf_counter() - started
    running = True
    while running:
        running = search.step(logits)
        timings.decode_s = time.perf_counter() - started - timings.prefill_s
        yield search.best(options.num_return_sequences, running=running)
        if running:
            logits = search.feed()


class _Search:
    def __init__(
        self, engine: Engine, options: ResolvedOptions, prompt_ids: Sequence[int], max_new_tokens: int, ends: Ends
    ) -> None:
        self._engine = engine
        self._options = options
        self._prompt = list(prompt_ids)
        self._max_new_tokens = max_new_tokens
        self._ends = ends
        count = options.num_beams
        self._running: list[list[int]] = [[] for _ in range(count)]
        self._running_scores = np.full(count, _OUT, np.float32)
        self._running_scores[0] = 0.0
        self._done: list[list[int]] = [[] for _ in range(count)]
        self._done_scores = np.full(count, _OUT, np.float32)
        self._is_done = np.zeros(count, bool)
        self._improvable = True
        self._cache = engine.new_cache(1, len(prompt_ids) + max_new_tokens - 1, max_batch_size=count)
        self._processors = [make_processors(options, self._prompt) for _ in range(count)]

    def prefill(self) -> Scores:
        """Compute the prompt once, for all beams."""
        logits = self._engine.prefill(self._cache, [self._prompt])[0]
        self._cache.reorder([0] * self._options.num_beams)
        self._forward = self._engine.new_forward(self._cache)
        return np.repeat(logits, self._options.num_beams, axis=0)

    def feed(self) -> Scores:
        """Compute the newest token of each beam."""
        for row, ids in enumerate(self._running):
            self._forward.input_ids[row, 0] = ids[-1]
        self._forward.run(self._cache.lengths + np.int32(1))
        logits: Scores = self._forward.logits()[:, 0]
        return logits

    def step(self, logits: Scores) -> bool:
        """Extend all beams by their likeliest tokens; tell whether the search continues."""
        options, count = self._options, self._options.num_beams
        scores = self._log_probabilities(logits) + self._running_scores[:, None]
        kept = max(2, 1 + len(options.eos_token_ids)) * count
        order = largest(scores.reshape(-1), kept)[:kept]
        top_scores = scores.reshape(-1)[order]
        if top_scores[0] == -np.inf:
            raise OptionError(NOTHING_LEFT)
        parents, tokens = np.divmod(order, scores.shape[1])
        sequences = [[*self._running[p], int(t)] for p, t in zip(parents, tokens, strict=True)]
        length = len(sequences[0])
        ended = np.array(
            [length >= self._max_new_tokens or ids[-1] in options.eos_token_ids or self._ends(ids) for ids in sequences]
        )
        open_scores = top_scores + ended.astype(np.float32) * _OUT
        chosen = largest(open_scores, count)[:count]
        self._finish(sequences, top_scores, ended, length)
        self._running = [sequences[index] for index in chosen]
        self._running_scores = open_scores[chosen]
        self._follow(parents[chosen].tolist())
        self._improvable = self._improvable and self._may_improve(length)
        open_beams = not (self._is_done.all() and options.early_stopping is True)
        return bool(self._improvable and open_beams and not ended.all())

    def _log_probabilities(self, logits: Scores) -> Scores:
        allowed = self._engine.allowed_vocab_size
        logits = logits[:, :allowed]
        check_finite(logits, f"at step {len(self._running[0])} of the beams")
        logprobs = log_softmax(logits)
        for row, new_ids, processors in zip(logprobs, self._running, self._processors, strict=True):
            ids = [*self._prompt, *new_ids]
            for processor in processors:
                processor(row, ids, len(self._prompt))
        return logprobs

    def _follow(self, parents: list[int]) -> None:
        """Let beam i continue that of parents[i]: its cache, and the state of its processors."""
        self._cache.reorder(parents)
        before, taken = self._processors, set[int]()
        self._processors = []
        for parent in parents:
            kept: list[Processor] = before[parent]
            self._processors.append([each.fork() for each in kept] if parent in taken else kept)
            taken.add(parent)

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
        best = largest(merged, count)[:count]
        both = [*self._done, *sequences]
        is_done = np.concatenate((self._is_done, just_ended))
        self._done, self._done_scores, self._is_done = [both[index] for index in best], merged[best], is_done[best]

    def _may_improve(self, length: int) -> bool:
        options = self._options
        reach = self._max_new_tokens if options.early_stopping == "never" and options.length_penalty > 0 else length
        possible = self._running_scores[0] / np.float32(reach**options.length_penalty)
        worst = np.where(self._is_done, self._done_scores.min(), _OUT)
        return bool((possible > worst).any())

    def best(self, count: int, *, running: bool) -> list[Beam]:
        """Return the best whole continuations, best first; while the search runs, also those that are not whole."""
        done = zip(self._done, self._done_scores, self._is_done, strict=True)
        found = [Beam(ids, float(score)) for ids, score, is_done in done if is_done or not running]
        if running:
            over = len(self._running[0]) ** self._options.length_penalty
            unfinished = zip(self._running, self._running_scores, strict=True)
            found += [Beam(ids, float(score) / over) for ids, score in unfinished]
            found.sort(key=lambda beam: -beam.score)
        return found[:count]
