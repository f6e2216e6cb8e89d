"""From token ids to token ids: one open graph, its caches and calls. Knows no text and draws no samples itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ortgpt.bundle import ModelConfig
from ortgpt.cache import Cache, FixedCache, new_cache
from ortgpt.call import Call, Logits, new_call
from ortgpt.contract import CacheKind
from ortgpt.decoding import Decoding
from ortgpt.errors import ContextLengthError, EngineError
from ortgpt.guessing import guess_ahead
from ortgpt.prefill import LEAST_TOKENS, Prefill
from ortgpt.prefixes import PrefixCache
from ortgpt.rows import Row, Timings
from ortgpt.selector import Selector
from ortgpt.session import Session


class Engine:
    """Run one open graph. Holds no state of a generation: several threads may use it at once."""

    def __init__(
        self,
        session: Session,
        config: ModelConfig,
        *,
        masked_tokens: int = 0,
        prefill: Prefill | None = None,
        selector: Selector | None = None,
    ) -> None:
        self.session = session
        self.config = config
        self.prefill_graph = prefill
        self.selector = selector
        self.allowed_vocab_size = config.vocab_size - masked_tokens

    @property
    def token_bytes(self) -> int:
        """How much memory one token takes: its keys and values, and logits where the graph computes all of them."""
        spec, config = self.session.cache, self.config
        held = 2 * config.n_layer * config.n_head * spec.head_dim * np.dtype(spec.dtype).itemsize
        return held + (4 * config.vocab_size if spec.kind == CacheKind.GROWING else 0)

    @property
    def rows_are_views(self) -> bool:
        """Whether a row of a cache is memory of its own on the CPU, which may be computed anew beside the others."""
        return self.session.cache.kind == CacheKind.FIXED and self.session.device.is_cpu

    def new_cache(self, batch_size: int, tokens: int, *, room: int | None = None) -> Cache:
        """Make an empty cache for `batch_size` rows of at most `tokens` tokens, with room for `room` rows, if more.

        Raises EngineError where there is not the memory for it.
        """
        try:
            return new_cache(
                self.session,
                n_layer=self.config.n_layer,
                n_head=self.config.n_head,
                batch_size=batch_size,
                tokens=tokens,
                room=room,
            )
        except MemoryError as error:
            size = max(batch_size, room or 0) * tokens * self.token_bytes
            raise EngineError(f"no memory for a cache of {size / 2**30:,.1f} GiB; ask for fewer tokens") from error

    def new_call(self, cache: Cache, *, sequence_length: int = 1, logit_count: int = 1) -> Call:
        """Make a call of this shape over `cache`; by default a decode step."""
        many = cache.batch_size * sequence_length >= LEAST_TOKENS and sequence_length > 1
        session = self.prefill_graph.session() if self.prefill_graph and many else self.session
        return new_call(session, self.config, cache, sequence_length=sequence_length, logit_count=logit_count)

    def check_context(self, rows: Sequence[Row]) -> None:
        """Raise ContextLengthError, with the numbers, when prompt and new tokens of a row exceed the context."""
        n_positions = self.config.n_positions
        for index, row in enumerate(rows):
            prompt, new = len(row.prompt_ids), row.max_new_tokens
            slides = row.window is not None and row.window.stride
            if prompt + new > n_positions and not slides:
                fit = f"at most {n_positions - prompt} new tokens fit" if prompt < n_positions else "shorten the prompt"
                where = f"row {index}: " if len(rows) > 1 else ""
                raise ContextLengthError(
                    f"{where}a prompt of {prompt} tokens and {new} new ones exceed the context of {n_positions} "
                    f"tokens; {fit}"
                )

    def generate(
        self,
        rows: Sequence[Row],
        timings: Timings | None = None,
        *,
        prefixes: PrefixCache | None = None,
        cache: Cache | None = None,
    ) -> Iterator[list[int]]:
        """Generate into `rows`; after each step yield the indices of the rows that gained a token.

        A row ends at one of its `eos_token_ids`, at `max_new_tokens`, or when the caller sets its `finish_reason`
        between steps. A step reads every weight once for the whole batch. `prefixes` has what need not be computed
        again; `cache`, of one row, holds the beginning of its tokens, and stays. Raises ContextLengthError at the call,
        before any work, when a row cannot fit; NonFiniteLogitsError when the model computes NaN or infinity;
        EngineError when ONNX Runtime fails.
        """
        self.check_context(rows)
        timings = Timings() if timings is None else timings
        assert len(rows) == 1 or not any(row.guess for row in rows), "rows that guess go one by one"
        if rows[0].guess is not None:
            return guess_ahead(self, rows[0], rows[0].guess, timings, prefixes, cache)
        return Decoding(self, rows, timings, prefixes, cache).run()

    def prefill(
        self,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        logit_positions: npt.NDArray[np.int64] | None = None,
    ) -> Logits:
        """Append each prompt to its row and return logits (batch_size, logit_count, vocab_size).

        Prompts are padded on the right. Logits are those of each row's last token unless `logit_positions`, int64
        (batch_size, logit_count), names places counted from each prompt's start. Where the cache does not take several
        tokens for all rows at once, they are served in turn.
        """
        if isinstance(cache, FixedCache) and not cache.takes_several_tokens:
            positions = [None] * len(prompts) if logit_positions is None else [row[None] for row in logit_positions]
            return np.concatenate([self.prefill(cache.row(i), [ids], positions[i]) for i, ids in enumerate(prompts)])
        return self.prefill_call(cache, prompts, logit_positions).logits()

    def prefill_call(
        self,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        logit_positions: npt.NDArray[np.int64] | None = None,
    ) -> Call:
        """Do as prefill(), for a cache that takes several tokens for all rows, and leave the logits on the device."""
        counts = np.array([len(ids) for ids in prompts], np.int32)
        seq = int(counts.max())
        if isinstance(cache, FixedCache) and seq > 1 and not cache.lengths.any():
            # The fused attention takes the queries in blocks and multiplies a block of one by a routine that rounds
            # differently; with an even count none is left alone, and a row equals its solo run to the bit.
            seq += seq % 2
        places = counts[:, None].astype(np.int64) - 1 if logit_positions is None else logit_positions
        call = self.new_call(cache, sequence_length=seq, logit_count=int(places.shape[1]))
        for row, ids in enumerate(prompts):
            call.input_ids[row, : len(ids)] = ids
        call.logit_positions[...] = places
        call.run(cache.lengths + counts, total=int(cache.lengths.max()) + seq)
        return call
