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

from ortgpt.cache import Cache, Held
from ortgpt.call import Call, Logits
from ortgpt.decoding import pick_token
from ortgpt.prefixes import PrefixCache
from ortgpt.rows import Guess, Row, Timings

if TYPE_CHECKING:
    from ortgpt.engine import Engine


def guess_ahead(
    engine: Engine, row: Row, guess: Guess, timings: Timings, prefixes: PrefixCache | None, cache: Cache | None
) -> Iterator[list[int]]:
    """Generate into `row`; yield [0] for each token it gained. Raises as Engine.generate() does."""
    started = time.perf_counter()
    n_positions = engine.config.n_positions
    cache = cache or engine.new_cache(1, row.room(n_positions))
    seen = row.seen()
    if prefixes is not None and not cache.lengths.any():
        held: Held | None = prefixes.find(seen)
        cache.fill([held])
    logits = engine.prefill(cache, [seen[int(cache.lengths[0]) :]])[0]
    timings.prefill_s = time.perf_counter() - started
    steps = _Steps(engine, cache)
    proposed: list[int] = []
    base = len(row.ids)  # of the tokens so far, those that stood when the logits were computed
    while True:
        for place in range(len(proposed) + 1):
            row.extend(pick_token(engine, logits[place], row, 0))
            timings.decode_s = time.perf_counter() - started - timings.prefill_s
            right = place < len(proposed) and row.ids[-1] == proposed[place]
            yield [0]
            if row.finish_reason is not None or not right:
                break
        accepted = len(row.ids) - base - 1
        if proposed:
            guess.learn(len(proposed), accepted)
        cache.rewind(int(cache.lengths[0]) - (len(proposed) - accepted))
        if row.finish_reason is not None:
            break
        base = len(row.ids)
        room = n_positions - int(cache.lengths[0]) - 1  # what fits behind the newest token
        if room < 0:
            cache.rewind(0)
            proposed, logits = [], engine.prefill(cache, [row.seen()])[0]
            continue
        most = min(room, row.max_new_tokens - len(row.token_ids) - 1)
        proposed = guess.propose(row.ids, most) if most > 0 else []
        logits = steps.run([row.ids[-1], *proposed])
    if prefixes is not None and (row.window is None or not row.window.stride):
        prefixes.keep(row.ids[: int(cache.lengths[0])], cache.read(0))


class _Steps:
    """Calls for one row that feed a few tokens at once; each shape's is made once."""

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self._engine = engine
        self._cache = cache
        self._calls: dict[int, Call] = {}

    def run(self, ids: Sequence[int]) -> Logits:
        """Feed `ids` and return the logits behind each, (tokens, vocab_size)."""
        count = len(ids)
        if count not in self._calls:
            self._calls[count] = self._engine.new_call(self._cache, sequence_length=count, logit_count=count)
            self._calls[count].logit_positions[...] = np.arange(count)
        call = self._calls[count]
        call.input_ids[0] = ids
        call.run(self._cache.lengths + np.int32(count))
        found: Logits = call.logits()[0]
        return found
