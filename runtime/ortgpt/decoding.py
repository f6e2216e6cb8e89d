"""The decode loop of a batch: prefill, one step a token, rows that end. Knows no text and draws no samples itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortgpt.cache import Cache, FixedCache
from ortgpt.call import Call, Logits
from ortgpt.errors import NonFiniteLogitsError
from ortgpt.logprobs import token_logprob
from ortgpt.prefixes import PrefixCache
from ortgpt.rows import Row, Timings
from ortgpt.selector import SelectorCall

if TYPE_CHECKING:
    from ortgpt.engine import Engine

_MOVE_TOKENS = 64  # of a row that is moved in the cache cost about what one row less saves in a step


class Decoding:
    """Rows in flight and their cache, whose row i belongs to rows[slots[i]]."""

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Row],
        timings: Timings,
        prefixes: PrefixCache | None = None,
        cache: Cache | None = None,
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._timings = timings
        self._prefixes = prefixes
        self._seen = [tuple(row.seen()) for row in rows]
        self.cache = cache or engine.new_cache(
            len(set(self._seen)),
            max(row.room(engine.config.n_positions) for row in rows),
            room=len(rows),
        )
        self._slots = list(range(len(rows)))
        self._step_call: Call | None = None
        selector = engine.selector
        self._select = None if selector is None else selector.new_call(len(rows))
        self._most = 0 if selector is None else selector.count

    def run(self) -> Iterator[list[int]]:
        """Generate; after each step yield the indices of the rows that gained a token."""
        started = time.perf_counter()
        source = self._prefill()
        self._timings.prefill_s = time.perf_counter() - started
        while True:
            slots = [slot for slot, index in enumerate(self._slots) if self._rows[index].finish_reason is None]
            for slot, token_id in zip(slots, self._pick(source, slots), strict=True):
                self._rows[self._slots[slot]].extend(token_id)
            self._timings.decode_s = time.perf_counter() - started - self._timings.prefill_s
            yield sorted(self._slots[slot] for slot in slots)
            if not self._drop_finished(slots):
                return
            source = self._step()

    def _prefill(self) -> Call | Logits:
        """Feed what the model sees of each row; rows that begin alike to the end are computed once."""
        engine = self._engine
        unique = list(dict.fromkeys(self._seen))
        fill_prefixes(self.cache, self._prefixes, unique)
        rests = [ids[done:] for ids, done in zip(unique, self.cache.lengths.tolist(), strict=True)]
        if self.cache.takes_several_tokens:
            call = engine.prefill_call(self.cache, rests)
            if len(unique) == len(self._seen):
                return call
            logits = call.logits()[:, 0]
        else:
            logits = engine.prefill(self.cache, rests)[:, 0]
        places = {ids: place for place, ids in enumerate(unique)}
        sources = [places[ids] for ids in self._seen]
        if len(unique) < len(self._seen):
            self.cache.arrange(sources)
        return logits[sources]

    def _pick(self, source: Call | Logits, slots: Sequence[int]) -> list[int]:
        """Return the next token of the row in each slot; on the device that has the logits, where a few decide."""
        if not isinstance(source, np.ndarray):
            if self._select is not None and self._few_decide(slots):
                return self._pick_of_few(source, self._select, slots)
            source = source.logits()[:, 0]
        return [self._pick_of_all(source[slot], self._slots[slot]) for slot in slots]

    def _few_decide(self, slots: Sequence[int]) -> bool:
        """Tell whether what the selector brings back decides the next token of the row in each slot."""
        rows = [self._rows[self._slots[slot]] for slot in slots]
        return all(row.logprobs is None and row.pick.count and row.pick.count <= self._most for row in rows)

    def _pick_of_all(self, logits: Logits, index: int) -> int:
        return pick_token(self._engine, logits, self._rows[index], index)

    def _pick_of_few(self, call: Call, select: SelectorCall, slots: Sequence[int]) -> list[int]:
        penalized, penalties = [np.zeros(0, np.int64)] * len(self._slots), [1.0] * len(self._slots)
        for slot in slots:
            row = self._rows[self._slots[slot]]
            penalized[slot], penalties[slot] = row.pick.penalized_ids(row.ids), row.pick.penalty
        logits, ids, non_finite = select.run(call.device_logits, penalized, penalties)
        chosen = []
        for slot in slots:
            row = self._rows[self._slots[slot]]
            count = row.pick.count
            assert count is not None
            # With equals beyond the last one that decides, more would have to be looked at than came back.
            whole = logits.shape[1] == self._engine.allowed_vocab_size or logits[slot, -1] < logits[slot, count - 1]
            if whole and not np.isnan(non_finite[slot]):
                chosen.append(row.pick.among(ids[slot], logits[slot], row.ids))
            else:
                chosen.append(self._pick_of_all(call.logits()[slot, 0], self._slots[slot]))
        return chosen

    def _drop_finished(self, slots: Sequence[int]) -> bool:
        """Let go of rows that ended in this step; tell whether any goes on."""
        ended = [slot for slot in slots if self._has_ended(slot)]
        if not ended:
            return True
        for slot in ended:
            keep_prefix(self._prefixes, self._rows[self._slots[slot]], self.cache, slot)
        going = [slot for slot in slots if not self._has_ended(slot)]
        if going and self._engine.session.device.is_cpu:
            rows = [self._rows[self._slots[slot]] for slot in going]
            steps_left = max(row.max_new_tokens - len(row.token_ids) for row in rows)
            if steps_left > 2 + int(self.cache.lengths.max()) // _MOVE_TOKENS:
                self._close_gaps()
        return bool(going)

    def _has_ended(self, slot: int) -> bool:
        return self._rows[self._slots[slot]].finish_reason is not None

    def _close_gaps(self) -> None:
        """Move the cache's last rows to where rows have ended, so that a step computes the others alone."""
        sources = list(range(len(self._slots)))
        for slot in reversed(range(len(self._slots))):
            if self._has_ended(slot):
                last = sources.pop()
                if slot < len(sources):
                    sources[slot] = last
        self.cache.arrange(sources)
        self._slots = [self._slots[slot] for slot in sources]
        self._step_call = None

    def _step(self) -> Call | Logits:
        """Feed each row's newest token; where a row's context is full, compute what it still sees anew."""
        cache, rows = self.cache, [self._rows[index] for index in self._slots]
        lengths = cache.lengths.copy()
        full = []
        for slot, row in enumerate(rows):
            if row.finish_reason is not None:
                continue  # it goes on computing in its last slot; its length, and so the batch's, no longer grows
            if row.window is not None and lengths[slot] >= row.window.n_positions:
                full.append(slot)
            else:
                lengths[slot] += 1
        if len(full) == len(rows) == 1:
            cache.rewind(0)
            return self._engine.prefill_call(cache, [rows[0].seen()])
        call = self._step_call = self._step_call or self._engine.new_call(cache)
        for slot, row in enumerate(rows):
            call.input_ids[slot, 0] = row.ids[-1]
        call.run(lengths)
        if not full:
            return call
        logits = call.logits()[:, 0].copy()
        for slot in full:
            assert isinstance(cache, FixedCache), "rows that slide on a growing cache go one by one"
            own = cache.row(slot)
            own.rewind(0)
            logits[slot] = self._engine.prefill(own, [rows[slot].seen()])[0, 0]
        return logits


def fill_prefixes(cache: Cache, prefixes: PrefixCache | None, texts: Sequence[Sequence[int]]) -> None:
    """Let each row of an empty cache hold what was kept of the beginning of its text; leave one that is not empty."""
    if prefixes is not None and not cache.lengths.any():
        cache.fill([prefixes.find(ids) for ids in texts])


def keep_prefix(prefixes: PrefixCache | None, row: Row, cache: Cache, slot: int) -> None:
    """Keep what the cache holds of a row that ended, unless parts of its text have been let go."""
    if prefixes is not None and not (row.window is not None and row.window.stride):
        prefixes.keep(row.ids[: int(cache.lengths[slot])], lambda: cache.read(slot))


def pick_token(engine: Engine, logits: Logits, row: Row, index: int) -> int:
    """Return a row's next token by logits (vocab_size,), which are changed, and note how likely it was if asked to.

    Raises NonFiniteLogitsError, naming step and row, when the model computed NaN or infinity.
    """
    if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
        raise NonFiniteLogitsError(
            f"{np.count_nonzero(~np.isfinite(logits))} of {logits.size} logits are not finite at step "
            f"{len(row.token_ids)} of row {index}; the weights are damaged, or overflow in this precision"
        )
    logits[engine.allowed_vocab_size :] = -np.inf
    if row.logprobs is None:
        return row.pick(logits, row.ids)
    allowed = logits[: engine.allowed_vocab_size].copy()
    token_id = row.pick(logits, row.ids)
    row.token_logprobs.append(token_logprob(allowed, token_id, row.logprobs))
    return token_id
