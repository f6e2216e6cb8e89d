"""The key-value cache of one generation: who owns which memory, and how many tokens each row holds.

A fixed cache is one buffer a layer that the graph updates in place: bound as past and as present, it is the same
memory on the graph's device, so a step moves no cache. A growing cache is replaced by what each call returns. Knows no
token and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.contract import CacheKind, past_names
from ortgpt.errors import EngineError
from ortgpt.session import Session

_ROUND_TO = 64  # positions; keeps the number of different buffer shapes small

Lengths = npt.NDArray[np.int32]
Held = Sequence[npt.NDArray[Any]]  # what a row holds: (n_head, tokens, head_dim) a layer and kind


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
        self._room = buffers  # rows that ended leave it, and it stays for the others

    @classmethod
    def allocate(
        cls, session: Session, *, n_layer: int, n_head: int, batch_size: int, tokens: int, room: int
    ) -> FixedCache:
        """Make an empty cache with room for `tokens` positions a row, rounded up, and for `room` rows."""
        spec, names = session.cache, past_names(n_layer)
        capacity = -(-tokens // _ROUND_TO) * _ROUND_TO
        shape = (batch_size, n_head, capacity, spec.head_dim)
        lengths = np.zeros(batch_size, np.int32)
        if not session.device.is_cpu:
            return cls(session, capacity, [session.empty(shape, spec.dtype) for _ in names], [], lengths)
        whole = [np.empty((room, *shape[1:]), np.dtype(spec.dtype)) for _ in names]
        cache = cls._over(session, [buffer[:batch_size] for buffer in whole], lengths)
        cache._room = whole
        return cache

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

    def arrange(self, sources: Sequence[int]) -> None:
        """Let row i hold what row sources[i] held; the batch then has len(sources) rows, for which it has room.

        Calls over the cache have to be made anew where the number of rows changed. On a GPU all passes by the CPU.
        """
        count, lengths = len(sources), self.lengths[list(sources)]
        if not self.buffers:
            for index, value in enumerate(self.values if list(sources) != list(range(self.batch_size)) else ()):
                moved = value.numpy()[list(sources)]
                if count == self.batch_size:
                    value.update_inplace(moved)  # what calls have bound stays
                else:
                    self.values[index] = self.session.copy_in(moved)
        else:
            moves = [(row, source) for row, source in enumerate(sources) if row != source]
            if moves:
                rows, origins = map(list, zip(*moves, strict=True))
                tokens = int(lengths[rows].max())
                for buffer in self._room:
                    buffer[rows, :, :tokens] = buffer[origins, :, :tokens]
            if count != self.batch_size:
                self.buffers = [buffer[:count] for buffer in self._room]
                self.values = [self.session.share(buffer) for buffer in self.buffers]
        self.lengths = lengths

    def rewind(self, tokens: int) -> None:
        """Let the only row hold its first `tokens` tokens."""
        self.lengths[0] = tokens

    def read(self, row: int) -> list[npt.NDArray[Any]]:
        """Return copies of what a row holds, (n_head, tokens, head_dim) a layer and kind."""
        tokens = int(self.lengths[row])
        return [buffer[row, :, :tokens].copy() for buffer in self.buffers or [each.numpy() for each in self.values]]

    def fill(self, rows: Sequence[Held | None]) -> None:
        """Let each row of an empty cache hold what read() returned, or nothing."""
        arrays = self.buffers or [each.numpy() for each in self.values]
        for row, held in enumerate(rows):
            for array, part in zip(arrays, held or (), strict=held is not None):
                array[row, :, : part.shape[1]] = part
            self.lengths[row] = held[0].shape[1] if held else 0
        if not self.buffers:
            self.values = [self.session.copy_in(array) for array in arrays]


class GrowingCache:
    """Keys and values of a batch, (batch_size, n_head, slots, head_dim) a layer, replaced by each call.

    Slots are shared by all rows; `mask`, int64 (batch_size, slots), is 1 where a row's slot holds a token. `lengths`,
    int32 (batch_size), counts them.
    """

    takes_several_tokens = True

    def __init__(self, session: Session, values: list[Any], mask: npt.NDArray[np.int64]) -> None:
        self.session = session
        self.values = values
        self.mask = mask
        self.lengths = np.zeros(len(mask), np.int32)

    @classmethod
    def allocate(cls, session: Session, *, n_layer: int, n_head: int, batch_size: int) -> GrowingCache:
        """Make an empty cache."""
        spec = session.cache
        empty = np.zeros((batch_size, n_head, 0, spec.head_dim), np.dtype(spec.dtype))
        values = [session.share(empty) for _ in past_names(n_layer)]
        return cls(session, values, np.zeros((batch_size, 0), np.int64))

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def arrange(self, sources: Sequence[int]) -> None:
        """Let row i hold what row sources[i] held; the batch then has len(sources) rows."""
        rows = list(sources)
        if rows != list(range(self.batch_size)):
            self.values = [self.session.share(value.numpy()[rows]) for value in self.values]
            self.mask, self.lengths = self.mask[rows], self.lengths[rows]

    def rewind(self, tokens: int) -> None:
        """Let the only row hold its first `tokens` tokens."""
        if tokens != self.lengths[0]:
            slots = int(np.searchsorted(np.cumsum(self.mask[0]), tokens)) + 1 if tokens else 0
            self.values = [self.session.share(value.numpy()[:, :, :slots].copy()) for value in self.values]
            self.mask = self.mask[:, :slots]
            self.lengths[0] = tokens

    def read(self, row: int) -> list[npt.NDArray[Any]]:
        """Return copies of what a row holds, (n_head, tokens, head_dim) a layer and kind."""
        slots = np.flatnonzero(self.mask[row])
        return [value.numpy()[row][:, slots] for value in self.values]

    def fill(self, rows: Sequence[Held | None]) -> None:
        """Let each row of an empty cache hold what read() returned, or nothing."""
        slots = max(held[0].shape[1] if held else 0 for held in rows)
        self.mask = np.zeros((self.batch_size, slots), np.int64)
        for row, held in enumerate(rows):
            self.lengths[row] = held[0].shape[1] if held else 0
            self.mask[row, : self.lengths[row]] = 1
        for index, value in enumerate(self.values):
            _, n_head, _, head_dim = value.shape()
            array = np.zeros((self.batch_size, n_head, slots, head_dim), np.dtype(self.session.cache.dtype))
            for row, held in enumerate(rows):
                if held:
                    array[row, :, : held[index].shape[1]] = held[index]
            self.values[index] = self.session.share(array)


Cache = FixedCache | GrowingCache


def new_cache(
    session: Session, *, n_layer: int, n_head: int, batch_size: int, tokens: int, room: int | None = None
) -> Cache:
    """Make an empty cache of the graph's kind for `batch_size` rows of at most `tokens` tokens.

    `room` is for how many rows it may be arranged, by default that many.
    """
    if session.cache.kind == CacheKind.GROWING:
        return GrowingCache.allocate(session, n_layer=n_layer, n_head=n_head, batch_size=batch_size)
    return FixedCache.allocate(
        session, n_layer=n_layer, n_head=n_head, batch_size=batch_size, tokens=tokens, room=room or batch_size
    )
