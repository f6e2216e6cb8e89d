"""Speculative decoding of one row: a draft proposes tokens, one forward computes all of them, accepted ones are kept.

Each token is picked from the model's own logits, by the row's own random numbers; a proposed token is accepted if it is
the picked one. So drafts change how long a text takes, but neither its tokens nor their distribution (Leviathan et al.
2023 accept by probability instead). Knows no text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from ortgpt.decode.drafts import Draft
from ortgpt.decode.next_token import pick_token
from ortgpt.decode.row import Row
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Forward, Logits
from ortgpt.engine.kv_cache import Cache
from ortgpt.engine.prefix_cache import PrefixCache, keep_prefix, load_prefixes
from ortgpt.results import Timings

_MAX_KEPT_TOKENS = 12  # forwards of more tokens hold too many logits to be kept


def generate_speculatively(
    engine: Engine, row: Row, draft: Draft, timings: Timings, prefixes: PrefixCache | None, cache: Cache | None
) -> Iterator[list[int]]:
    """Generate into `row`; yield [0] for each token it gained. Raises as decode.generate.generate() does."""
    started = time.perf_counter()
    n_positions = engine.config.n_positions
    cache = cache or engine.new_cache(1, row.max_positions(n_positions))
    visible = row.visible_ids()
    if row.prompt_kv:
        cache.load_rows([row.prompt_kv])
        row.prompt_kv = None  # the cache has it now
    else:
        load_prefixes(prefixes, cache, [visible])
    logits = engine.prefill(cache, [visible[int(cache.lengths[0]) :]])[0]
    timings.prefill_s = time.perf_counter() - started
    steps = _Steps(engine, cache)
    proposed: list[int] = []
    accepted = int(cache.lengths[0])  # tokens in the cache that are the row's own
    try:
        while True:
            base = len(row.ids)
            for place in range(len(proposed) + 1):
                row.extend(pick_token(engine, logits[place], row, 0))
                timings.decode_s = time.perf_counter() - started - timings.prefill_s
                is_accepted = place < len(proposed) and row.ids[-1] == proposed[place]
                yield [0]
                if row.finish_reason is not None or not is_accepted:
                    break
                accepted += 1
            if proposed:
                draft.learn(len(proposed), len(row.ids) - base - 1)
            cache.crop(accepted)
            if row.finish_reason is not None:
                if not row.slides:
                    keep_prefix(prefixes, row.ids, cache, 0)
                return
            room = n_positions - accepted - 1  # positions after the newest token
            if room < 0:
                cache.crop(0)
                proposed, logits = [], engine.prefill(cache, [row.visible_ids()])[0]
                accepted = int(cache.lengths[0])
                continue
            most = min(room, row.max_new_tokens - len(row.token_ids) - 1)
            proposed = draft.propose(row.ids, most) if most > 0 else []
            logits = steps.run([row.ids[-1], *proposed])
            accepted += 1
    finally:
        cache.crop(min(accepted, int(cache.lengths[0])))  # whoever keeps the cache finds only the row's own tokens
        row.draft = None


class _Steps:
    """Forwards of one row that feed a few tokens at once; that of each small shape is made once."""

    def __init__(self, engine: Engine, cache: Cache) -> None:
        self._engine = engine
        self._cache = cache
        self._forwards: dict[int, Forward] = {}

    def run(self, ids: Sequence[int]) -> Logits:
        """Feed `ids` and return the logits after each, (tokens, vocab_size)."""
        count = len(ids)
        forward = self._forwards.get(count)
        if forward is None:
            forward = self._engine.new_forward(self._cache, sequence_length=count, logit_count=count)
            forward.logit_positions[...] = np.arange(count)
            if count <= _MAX_KEPT_TOKENS:
                self._forwards[count] = forward
        forward.input_ids[0] = ids
        forward.run(self._cache.lengths + np.int32(count))
        logits: Logits = forward.logits()[0]
        return logits
