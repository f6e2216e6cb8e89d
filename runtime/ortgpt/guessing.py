"""The decode loop of one row that guesses: several tokens are computed at once, and those kept that were right.

Each token is picked from the model's own logits behind the tokens before it, by the row's own random numbers, and kept
or not by whether it was guessed. So guesses change the time that a text takes, and neither its tokens nor, when drawn,
their distribution. Knows no text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortgpt.cache import Cache
from ortgpt.call import Call, Logits
from ortgpt.decoding import fill_prefixes, keep_prefix, pick_token
from ortgpt.prefixes import PrefixCache
from ortgpt.rows import Guesser, Row, Timings

if TYPE_CHECKING:
    from ortgpt.engine import Engine

_KEPT = 12  # tokens; calls of more hold too many logits to be kept


def guess_ahead(
    engine: Engine, row: Row, guess: Guesser, timings: Timings, prefixes: PrefixCache | None, cache: Cache | None
) -> Iterator[list[int]]:
    """Generate into `row`; yield [0] for each token it gained. Raises as Engine.generate() does."""
    started = time.perf_counter()
    n_positions = engine.config.n_positions
    cache = cache or engine.new_cache(1, row.room(n_positions))
    seen = row.seen()
    fill_prefixes(cache, prefixes, [seen])
    logits = engine.prefill(cache, [seen[int(cache.lengths[0]) :]])[0]
    timings.prefill_s = time.perf_counter() - started
    steps = _Steps(engine, cache)
    proposed: list[int] = []
    sure = int(cache.lengths[0])  # tokens in the cache that are the row's own, and no guesses
    try:
        while True:
            base = len(row.ids)
            for place in range(len(proposed) + 1):
                row.extend(pick_token(engine, logits[place], row, 0))
                timings.decode_s = time.perf_counter() - started - timings.prefill_s
                right = place < len(proposed) and row.ids[-1] == proposed[place]
                yield [0]
                if row.finish_reason is not None or not right:
                    break
                sure += 1
            if proposed:
                guess.learn(len(proposed), len(row.ids) - base - 1)
            cache.rewind(sure)
            if row.finish_reason is not None:
                keep_prefix(prefixes, row, cache, 0)
                return
            room = n_positions - sure - 1  # what fits behind the newest token
            if room < 0:
                cache.rewind(0)
                proposed, logits = [], engine.prefill(cache, [row.seen()])[0]
                sure = int(cache.lengths[0])
                continue
            most = min(room, row.max_new_tokens - len(row.token_ids) - 1)
            proposed = guess.propose(row.ids, most) if most > 0 else []
            logits = steps.run([row.ids[-1], *proposed])
            sure += 1
    finally:
        cache.rewind(min(sure, int(cache.lengths[0])))  # whoever keeps the cache finds no guess in it
        row.guess = None


class _Steps:
    """Calls for one row that feed a few tokens at once; each small shape's is made once."""

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self._engine = engine
        self._cache = cache
        self._calls: dict[int, Call] = {}

    def run(self, ids: Sequence[int]) -> Logits:
        """Feed `ids` and return the logits behind each, (tokens, vocab_size)."""
        count = len(ids)
        call = self._calls.get(count)
        if call is None:
            call = self._engine.new_call(self._cache, sequence_length=count, logit_count=count)
            call.logit_positions[...] = np.arange(count)
            if count <= _KEPT:
                self._calls[count] = call
        call.input_ids[0] = ids
        call.run(self._cache.lengths + np.int32(count))
        found: Logits = call.logits()[0]
        return found
