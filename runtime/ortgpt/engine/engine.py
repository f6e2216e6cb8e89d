"""From token ids to logits: one open graph, its caches and forwards. Knows no text, no options and no rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.model_config import ModelConfig
from ortgpt.contract import CacheKind, KVShape
from ortgpt.engine.device_topk import DeviceTopK
from ortgpt.engine.forward import Forward, HiddenForward, HiddenStates, Logits, NativeForward, PortableForward
from ortgpt.engine.kv_cache import Cache, FixedCache, GrowingCache
from ortgpt.engine.prefill_graph import MIN_TOKENS, PrefillGraph
from ortgpt.errors import EngineError
from ortgpt.ort.session import Session

# Of texts computed together; more leave the CPU's caches: 2,048 take a third longer, one text at a time as long.
CPU_BATCH_TOKENS = 256

AnyForward = TypeVar("AnyForward", Forward, HiddenForward)


class Engine:
    """Run one open graph. Holds no state of a generation: several threads may use it at once."""

    def __init__(
        self,
        session: Session,
        config: ModelConfig,
        *,
        masked_tokens: int = 0,
        prefill_graph: PrefillGraph | None = None,
        device_topk: DeviceTopK | None = None,
    ) -> None:
        self.session = session
        self.config = config
        self.prefill_graph = prefill_graph
        self.device_topk = device_topk
        self.allowed_vocab_size = config.vocab_size - masked_tokens
        self.kv_shape = KVShape(
            n_layer=config.n_layer, n_head=config.n_head, head_dim=session.cache.head_dim, dtype=session.cache.dtype
        )

    @property
    def token_bytes(self) -> int:
        """The bytes of one token of a row: its keys and values, and logits if the graph returns all of them."""
        has_all_logits = self.session.cache.kind == CacheKind.GROWING
        return self.kv_shape.token_bytes + (4 * self.config.vocab_size if has_all_logits else 0)

    @property
    def rows_are_views(self) -> bool:
        """Whether a row of a cache is memory of its own on the CPU, so that it can be computed again alone."""
        return self.session.cache.kind == CacheKind.FIXED and self.session.device.is_cpu

    def new_cache(self, batch_size: int, tokens: int, *, max_batch_size: int | None = None) -> Cache:
        """Make an empty cache for `batch_size` rows of at most `tokens` tokens; it can grow to `max_batch_size` rows.

        Raises EngineError if there is not enough memory.
        """
        rows = max(batch_size, max_batch_size or 0)
        try:
            if self.session.cache.kind == CacheKind.GROWING:
                return GrowingCache.allocate(self.session, self.kv_shape, batch_size=batch_size)
            return FixedCache.allocate(
                self.session, self.kv_shape, batch_size=batch_size, tokens=tokens, max_batch_size=rows
            )
        except MemoryError as error:
            size = rows * tokens * self.token_bytes
            raise EngineError(f"no memory for a cache of {size / 2**30:,.1f} GiB; ask for fewer tokens") from error

    def new_forward(
        self, cache: Cache, *, sequence_length: int = 1, logit_count: int = 1, of_long_prompts: bool = False
    ) -> Forward:
        """Make a forward of this shape over `cache`; by default a decode step.

        With `of_long_prompts` it runs the prefill graph, if there is one. Steps, drafts included, run the decoder
        whatever their size, since the two graphs round differently.
        """
        session = self._session(of_long_prompts)
        if isinstance(cache, GrowingCache):
            return PortableForward(session, self.config, cache, sequence_length, logit_count)
        return NativeForward(session, self.config, cache, sequence_length, logit_count)

    def _session(self, of_long_prompts: bool) -> Session:
        return self.prefill_graph.session() if self.prefill_graph and of_long_prompts else self.session

    def prefill(
        self,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        logit_positions: npt.NDArray[np.int64] | None = None,
    ) -> Logits:
        """Append each prompt to its row and return logits (batch_size, logit_count, vocab_size).

        Prompts are padded on the right. Logits are those of each row's last token, unless `logit_positions`, int64
        (batch_size, logit_count), names positions counted from each prompt's start. If the cache does not take several
        tokens for all rows at once, the rows run one after another.
        """
        if isinstance(cache, FixedCache) and not cache.takes_several_tokens:
            runs = [range(row, row + 1) for row in range(len(prompts))]
        else:
            runs = self._runs(prompts)
        if len(runs) == 1:
            return self.prefill_forward(cache, prompts, logit_positions).logits()
        assert isinstance(cache, FixedCache), "only native bundles have a prefill graph"
        found = []
        for run in runs:
            rows = slice(run.start, run.stop)
            positions = None if logit_positions is None else logit_positions[rows]
            found.append(self.prefill(cache.rows(run), prompts[rows], positions))
        return np.concatenate(found)

    def takes_at_once(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Tell whether one graph computes all of these prompts, so that one forward of all rows is enough."""
        return len(self._runs(prompts)) == 1

    def _runs(self, prompts: Sequence[Sequence[int]]) -> list[range]:
        """Return the runs of prompts that one graph computes: a row's own length decides, not its companions'."""
        if self.prefill_graph is None:
            return [range(len(prompts))]
        sizes = [len([*run]) for _, run in itertools.groupby(len(ids) >= MIN_TOKENS for ids in prompts)]
        ends = list(itertools.accumulate(sizes))
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def prefill_forward(
        self,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        logit_positions: npt.NDArray[np.int64] | None = None,
    ) -> Forward:
        """Do as prefill(), and leave the logits on the device.

        The cache takes several tokens for all rows, and one graph computes all prompts (see takes_at_once).
        """
        positions = np.array([[len(ids) - 1] for ids in prompts]) if logit_positions is None else logit_positions

        def make(sequence_length: int, of_long_prompts: bool) -> Forward:
            return self.new_forward(
                cache,
                sequence_length=sequence_length,
                logit_count=positions.shape[1],
                of_long_prompts=of_long_prompts,
            )

        return _run_prompts(make, cache, prompts, positions)

    @property
    def has_hidden_states(self) -> bool:
        """Whether hidden_states() works."""
        return self.session.graph.has_hidden_states

    def hidden_states(self, prompts: Sequence[Sequence[int]], positions: npt.NDArray[np.int64]) -> HiddenStates:
        """Compute prompts, and return what the head would turn into logits: (batch_size, count, n_embd).

        `positions`, int64 (batch_size, count), count from each prompt's start. The bundle has hidden states, and one
        graph computes all prompts (see takes_at_once).
        """
        cache = self.new_cache(len(prompts), max(map(len, prompts)))
        assert isinstance(cache, FixedCache), "only native graphs have hidden states"

        def make(sequence_length: int, of_long_prompts: bool) -> HiddenForward:
            session = self._session(of_long_prompts)
            return HiddenForward(session, self.config, cache, sequence_length, positions.shape[1])

        return _run_prompts(make, cache, prompts, positions).hidden_states()


def _run_prompts(
    make: Callable[[int, bool], AnyForward],
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    positions: npt.NDArray[np.int64],
) -> AnyForward:
    """Run the forward that `make` makes for a length, and for long prompts or not, on prompts padded on the right."""
    counts = np.array([len(ids) for ids in prompts], np.int32)
    seq = int(counts.max())
    is_long = seq >= MIN_TOKENS
    if isinstance(cache, FixedCache) and seq > 1 and not cache.lengths.any():
        # The fused attention computes queries in blocks, and a block of one by a routine that rounds differently.
        # An even count leaves no block of one, so a row equals its solo run to the bit.
        seq += seq % 2
    forward = make(seq, is_long)
    for row, ids in enumerate(prompts):
        forward.input_ids[row, : len(ids)] = ids
    forward.logit_positions[...] = positions
    forward.run(cache.lengths + counts, total=int(cache.lengths.max()) + seq)
    return forward
