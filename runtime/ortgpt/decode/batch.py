"""The decode loop of a batch: prefill, one step for each token, rows that end. Knows no text and draws no samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from ortgpt.decode.next_token import pick_token
from ortgpt.decode.row import Row
from ortgpt.engine.device_topk import TopKForward
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Forward, Logits
from ortgpt.engine.kv_cache import Cache, FixedCache
from ortgpt.engine.prefix_cache import PrefixCache, keep_prefix, load_prefixes
from ortgpt.results import Timings

_MOVE_TOKENS = 64  # moving 64 tokens of a row in the cache costs as much as a step saves by one row fewer


class BatchDecoder:
    """Rows that are being generated, and their cache, whose row i belongs to rows[slots[i]]."""

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
        self._visible = [tuple(row.visible_ids()) for row in rows]
        self._cache = cache or engine.new_cache(
            len(set(self._visible)),
            max(row.max_positions(engine.config.n_positions) for row in rows),
            max_batch_size=len(rows),
        )
        self._slots = list(range(len(rows)))
        self._step_forward: Forward | None = None
        topk = engine.device_topk
        self._topk = None if topk is None else topk.new_forward(len(rows))
        self._topk_count = 0 if topk is None else topk.count

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

    def _prefill(self) -> Forward | Logits:
        """Compute the prompts; rows with the same prompt share one computation."""
        engine, cache = self._engine, self._cache
        unique = list(dict.fromkeys(self._visible))
        places = {ids: place for place, ids in enumerate(unique)}
        known = {ids: row.prompt_kv for ids, row in zip(self._visible, self._rows, strict=True) if row.prompt_kv}
        if known:
            cache.load_rows([known.get(ids) for ids in unique])
            for row in self._rows:
                row.prompt_kv = None  # the cache has it now
        else:
            load_prefixes(self._prefixes, cache, unique)
        rests = [ids[done:] for ids, done in zip(unique, cache.lengths.tolist(), strict=True)]
        if engine.takes_at_once(rests) and (cache.takes_several_tokens or max(map(len, rests)) == 1):
            forward = engine.prefill_forward(cache, rests)
            if len(unique) == len(self._visible):
                return forward
            logits = forward.logits()[:, 0]
        else:
            logits = engine.prefill(cache, rests)[:, 0]
        sources = [places[ids] for ids in self._visible]
        if len(unique) < len(self._visible):
            cache.reorder(sources)
        return logits[sources]

    def _pick(self, source: Forward | Logits, slots: Sequence[int]) -> list[int]:
        """Return the next token of the row in each slot; by the device's top-k where that is enough."""
        if not isinstance(source, np.ndarray):
            if self._topk is not None and self._topk_is_enough(slots):
                return self._pick_from_topk(source, self._topk, slots)
            source = source.logits()[:, 0]
        return [self._pick_from_all(source[slot], self._slots[slot]) for slot in slots]

    def _topk_is_enough(self, slots: Sequence[int]) -> bool:
        """Tell whether the largest logits, as many as the device returns, decide the token of the row in each slot."""
        rows = [self._rows[self._slots[slot]] for slot in slots]
        return all(row.logprobs is None and 0 < (row.sampler.top_count or 0) <= self._topk_count for row in rows)

    def _pick_from_all(self, logits: Logits, index: int) -> int:
        return pick_token(self._engine, logits, self._rows[index], index)

    def _pick_from_topk(self, forward: Forward, topk: TopKForward, slots: Sequence[int]) -> list[int]:
        penalized, penalties = [np.zeros(0, np.int64)] * len(self._slots), [1.0] * len(self._slots)
        for slot in slots:
            row = self._rows[self._slots[slot]]
            penalized[slot], penalties[slot] = row.sampler.penalized_ids(row.ids), row.sampler.penalty
        logits, ids, non_finite = topk.run(forward.device_logits, penalized, penalties)
        picked = []
        for slot in slots:
            row = self._rows[self._slots[slot]]
            count = row.sampler.top_count
            assert count is not None
            # If ties with the last deciding logit may lie outside the top k, all logits are needed.
            is_whole = logits.shape[1] == self._engine.allowed_vocab_size or logits[slot, -1] < logits[slot, count - 1]
            if is_whole and not np.isnan(non_finite[slot]):
                picked.append(row.sampler.pick_from_top(ids[slot], logits[slot], row.ids))
            else:
                picked.append(self._pick_from_all(forward.logits()[slot, 0], self._slots[slot]))
        return picked

    def _drop_finished(self, slots: Sequence[int]) -> bool:
        """Drop rows that ended in this step; tell whether any continues."""
        ended = [slot for slot in slots if self._has_ended(slot)]
        if not ended:
            return True
        for slot in ended:
            row = self._rows[self._slots[slot]]
            if not row.slides:
                keep_prefix(self._prefixes, row.ids, self._cache, slot)
        running = [slot for slot in slots if not self._has_ended(slot)]
        if running and self._engine.session.device.is_cpu:
            rows = [self._rows[self._slots[slot]] for slot in running]
            steps_left = max(row.max_new_tokens - len(row.token_ids) for row in rows)
            if steps_left > 2 + int(self._cache.lengths.max()) // _MOVE_TOKENS:
                self._close_gaps()
        return bool(running)

    def _has_ended(self, slot: int) -> bool:
        return self._rows[self._slots[slot]].finish_reason is not None

    def _close_gaps(self) -> None:
        """Move the cache's last rows to where rows have ended, so that a step computes only rows that run."""
        sources = list(range(len(self._slots)))
        for slot in reversed(range(len(self._slots))):
            if self._has_ended(slot):
                last = sources.pop()
                if slot < len(sources):
                    sources[slot] = last
        self._cache.reorder(sources)
        self._slots = [self._slots[slot] for slot in sources]
        self._step_forward = None

    def _step(self) -> Forward | Logits:
        """Feed each row's newest token; if a row's context is full, compute again what it still sees."""
        cache, rows = self._cache, [self._rows[index] for index in self._slots]
        lengths = cache.lengths.copy()
        full = []
        for slot, row in enumerate(rows):
            if row.finish_reason is not None:
                continue  # it computes in its last slot again; its length, and so the batch's, no longer grows
            if row.window is not None and lengths[slot] >= row.window.n_positions:
                full.append(slot)
            else:
                lengths[slot] += 1
        if len(full) == len(rows) == 1:
            cache.crop(0)
            return self._engine.prefill_forward(cache, [rows[0].visible_ids()])
        forward = self._step_forward = self._step_forward or self._engine.new_forward(cache)
        for slot, row in enumerate(rows):
            forward.input_ids[slot, 0] = row.ids[-1]
        forward.run(lengths)
        if not full:
            return forward
        logits = forward.logits()[:, 0].copy()
        for slot in full:
            assert isinstance(cache, FixedCache), "rows that slide on a growing cache run one by one"
            own = cache.row(slot)
            own.crop(0)
            logits[slot] = self._engine.prefill(own, [rows[slot].visible_ids()])[0, 0]
        return logits
