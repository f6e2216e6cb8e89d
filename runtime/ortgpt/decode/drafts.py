"""Drafts for speculative decoding: from n-grams of the text so far, or from a smaller model.

A proposed token costs what one more token in a step costs, and saves a step if it is accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Forward, Logits
from ortgpt.engine.kv_cache import Cache
from ortgpt.options.resolved import ResolvedOptions
from ortgpt.sampling.sampler import Sampler

_NGRAMS = (3, 2)  # the longest n-gram that occurred before decides
_COST = 0.5  # steps that one more token in a step costs: about the most that was measured, with 4-bit weights
_CREDIT = 1.0  # steps that drafts may cost before they saved any ...
_ALLOWED = 0.01  # ... and steps that they may cost besides, per token
_MAX_CREDIT = 16.0
_MAX_ASSISTED = 20  # tokens that a draft model proposes at once


class PromptLookup:
    """Propose what followed the last few tokens where the text had them before (Saxena 2023, prompt lookup).

    Drafts become longer when they are accepted, and stop while they cost more than they save.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(2, most)
        self._credit = _CREDIT
        self._read = 0
        self._places: dict[tuple[int, ...], int] = {}

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` ids that may follow `ids`."""
        new = len(ids) - self._read
        self._credit = min(self._credit + _ALLOWED * (new if self._read else 0), _MAX_CREDIT)
        self._index(ids)
        length = min(self._length, self._most, most, int(self._credit / _COST))
        if length < 1:
            return []
        for size in _NGRAMS:
            place = self._places.get(tuple(ids[len(ids) - size :]))
            if place is not None:
                return [*ids[place : place + length]]
        return []

    def _index(self, ids: Sequence[int]) -> None:
        """Note which tokens precede each place; the last place has no follower yet."""
        for place in range(max(1, self._read), len(ids)):
            for size in _NGRAMS:
                if place >= size:
                    self._places[tuple(ids[place - size : place])] = place
        self._read = len(ids)

    def learn(self, proposed: int, accepted: int) -> None:
        """Take note of how many of the proposed ids were accepted."""
        self._credit += accepted - _COST * proposed
        self._length = min(self._most, 2 * proposed) if accepted == proposed else max(1, accepted)


class AssistantDraft:
    """Propose what a smaller model would pick with the random numbers that the row will draw.

    With the same random numbers, two similar models draw the same token most of the time.
    """

    def __init__(
        self, engine: Engine, options: ResolvedOptions, sampler: Sampler, prompt_ids: Sequence[int], tokens: int
    ) -> None:
        self._engine = engine
        self._options = replace(options, logits_processor=(), grammar=None)
        self._sampler = sampler
        self._prompt_ids = prompt_ids
        self._tokens = min(tokens, engine.config.n_positions)
        self._length = options.num_assistant_tokens
        self._cache: Cache | None = None  # made with the first draft
        self._step: Forward | None = None
        self._fed: list[int] = []

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` ids that may follow `ids`."""
        room = self._engine.config.n_positions - len(ids) - 1
        count = min(self._length, most, room)
        if count < 1:
            return []
        sampler = Sampler(self._options, self._prompt_ids, copy.deepcopy(self._sampler.rng))
        found = list(ids)
        self._cache = self._cache or self._engine.new_cache(1, self._tokens)
        logits = self._catch_up(self._cache, ids)
        while True:
            logits[self._engine.allowed_vocab_size :] = -np.inf
            found.append(sampler.pick(logits, found))
            if len(found) == len(ids) + count:
                return found[len(ids) :]
            self._fed.append(found[-1])
            logits = self._run(self._cache, found[-1])

    def learn(self, proposed: int, accepted: int) -> None:
        """Take note of how many of the proposed ids were accepted."""
        self._length = min(self._length + 2, _MAX_ASSISTED) if accepted == proposed else max(1, self._length - 1)

    def _catch_up(self, cache: Cache, ids: Sequence[int]) -> Logits:
        """Let the cache hold `ids` and return the logits after them."""
        same = 0
        for fed, token_id in zip(self._fed, ids[:-1], strict=False):
            if fed != token_id:
                break
            same += 1
        cache.crop(same)
        self._fed = list(ids)
        if len(ids) - same == 1:
            return self._run(cache, ids[-1])
        logits: Logits = self._engine.prefill(cache, [ids[same:]])[0, 0]
        return logits

    def _run(self, cache: Cache, token_id: int) -> Logits:
        self._step = self._step or self._engine.new_forward(cache)
        self._step.input_ids[0, 0] = token_id
        self._step.run(cache.lengths + np.int32(1))
        found: Logits = self._step.logits()[0, 0]
        return found


Draft = PromptLookup | AssistantDraft
