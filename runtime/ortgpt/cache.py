"""The key-value cache of one generation: who owns which memory, and how many tokens each row holds.

A fixed cache is one buffer a layer that the graph updates in place: bound as past and as present, it is the same
memory on the graph's device, so a step moves no cache. A growing cache is replaced by what each call returns. Knows no
token and no text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.contract import CacheKind, past_names
from ortgpt.errors import EngineError
from ortgpt.session import Session

_ROUND_TO = 64  # positions; keeps the number of different buffer shapes small

Lengths = npt.NDArray[np.int32]


class FixedCache:
    """Keys and values of a batch: (batch_size, n_head, capacity, head_dim) a layer, updated in place.

    `lengths`, int32 (batch_size), counts the tokens each row holds; `capacity` is the positions it has room for. Rows
    are independent: a row's slots beyond its length are never read, whatever they hold. `buffers` are the memory of
    the OrtValues `values`; on a GPU there are none.
    """

    def __init__(
        self, session: Session, capacity: int, values: list[Any], buffers: list[npt.NDArray[Any]], lengths: Lengths
    ) -> None:
        self.session = session
        self.capacity = capacity
        self.values = values
        self.buffers = buffers
        self.lengths = lengths

    @classmethod
    def allocate(cls, session: Session, *, n_layer: int, n_head: int, batch_size: int, tokens: int) -> FixedCache:
        """Make an empty cache with room for `tokens` positions a row, rounded up."""
        spec = session.cache
        capacity = -(-tokens // _ROUND_TO) * _ROUND_TO
        shape = (batch_size, n_head, capacity, spec.head_dim)
        lengths = np.zeros(batch_size, np.int32)
        if session.device.is_cpu:
            return cls._over(session, [np.empty(shape, np.dtype(spec.dtype)) for _ in past_names(n_layer)], lengths)
        return cls(session, capacity, [session.empty(shape, spec.dtype) for _ in past_names(n_layer)], [], lengths)

    @classmethod
    def _over(cls, session: Session, buffers: list[npt.NDArray[Any]], lengths: Lengths) -> FixedCache:
        return cls(session, buffers[0].shape[2], [session.share(buffer) for buffer in buffers], buffers, lengths)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def takes_several_tokens(self) -> bool:
        """Whether every row may get several tokens at once: on top of a past, the operator takes them for one row."""
        return self.batch_size == 1 or not self.lengths.any()

    def row(self, index: int) -> FixedCache:
        """Return row `index` as a cache of batch size 1 over the same memory. Raises EngineError on a GPU."""
        if not self.buffers:
            raise EngineError("several tokens on top of a past run for one row only on a GPU; feed a batch one a step")
        rows = slice(index, index + 1)
        return self._over(self.session, [buffer[rows] for buffer in self.buffers], self.lengths[rows])


class GrowingCache:
    """Keys and values of a batch, (batch_size, n_head, slots, head_dim) a layer, replaced by each call.

    Slots are shared by all rows; `mask`, int64 (batch_size, slots), is 1 where a row's slot holds a token. `lengths`,
    int32 (batch_size), counts them.
    """

    def __init__(self, values: list[Any], mask: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.mask = mask
        self.lengths = np.zeros(len(mask), np.int32)

    @classmethod
    def allocate(cls, session: Session, *, n_layer: int, n_head: int, batch_size: int) -> GrowingCache:
        """Make an empty cache."""
        spec = session.cache
        empty = np.zeros((batch_size, n_head, 0, spec.head_dim), np.dtype(spec.dtype))
        return cls([session.share(empty) for _ in past_names(n_layer)], np.zeros((batch_size, 0), np.int64))

    @property
    def batch_size(self) -> int:
        return len(self.lengths)


Cache = FixedCache | GrowingCache


def new_cache(session: Session, *, n_layer: int, n_head: int, batch_size: int, tokens: int) -> Cache:
    """Make an empty cache of the graph's kind for `batch_size` rows of at most `tokens` tokens."""
    if session.cache.kind == CacheKind.GROWING:
        return GrowingCache.allocate(session, n_layer=n_layer, n_head=n_head, batch_size=batch_size)
    return FixedCache.allocate(session, n_layer=n_layer, n_head=n_head, batch_size=batch_size, tokens=tokens)
