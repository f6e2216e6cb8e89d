"""The key-value cache of one generation: the memory of its rows, and how many tokens each row holds.

A fixed cache is one buffer a layer that the graph updates in place: bound as past and as present, it is the same
memory on the graph's device, so a step moves no cache. A growing cache is replaced by what each call returns. Knows no
token and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.contract import KVShape, past_names
from ortgpt.errors import EngineError
from ortgpt.ort.session import Session

_ROUND_TO = 64  # positions; keeps the number of different buffer shapes small

Lengths = npt.NDArray[np.int32]
RowKV = Sequence[npt.NDArray[Any]]  # the keys and values of one row: (n_head, tokens, head_dim) for each layer and kind


class FixedCache:
    """Keys and values of a batch: (batch_size, n_head, capacity, head_dim) for each layer, updated in place.

    `lengths`, int32 (batch_size), counts the tokens that each row holds; `capacity` counts the positions of a row. Rows
    are independent: slots beyond a row's length are never read. `buffers` are the memory of the OrtValues `values`; on
    a GPU the list is empty.
    """

    def __init__(
        self, session: Session, capacity: int, values: list[Any], buffers: list[npt.NDArray[Any]], lengths: Lengths
    ) -> None:
        self.session = session
        self.capacity = capacity
        self.values = values
        self.buffers = buffers
        self.lengths = lengths
        self._whole = buffers  # with the rows that are not in use

    @classmethod
    def allocate(
        cls, session: Session, kv: KVShape, *, batch_size: int, tokens: int, max_batch_size: int
    ) -> FixedCache:
        """Make an empty cache of `tokens` positions a row, rounded up, that can grow to `max_batch_size` rows."""
        names = past_names(kv.n_layer)
        capacity = -(-tokens // _ROUND_TO) * _ROUND_TO
        shape = (batch_size, kv.n_head, capacity, kv.head_dim)
        lengths = np.zeros(batch_size, np.int32)
        if not session.device.is_cpu:
            return cls(session, capacity, [session.empty(shape, kv.dtype) for _ in names], [], lengths)
        whole = [np.empty((max_batch_size, *shape[1:]), np.dtype(kv.dtype)) for _ in names]
        cache = cls._over(session, [buffer[:batch_size] for buffer in whole], lengths)
        cache._whole = whole
        return cache

    @classmethod
    def _over(cls, session: Session, buffers: list[npt.NDArray[Any]], lengths: Lengths) -> FixedCache:
        return cls(session, buffers[0].shape[2], [session.share(buffer) for buffer in buffers], buffers, lengths)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def takes_several_tokens(self) -> bool:
        """Whether all rows may get several tokens in one forward.

        GroupQueryAttention accepts several tokens on a cache that is not empty only for batch size 1.
        """
        return self.batch_size == 1 or not self.lengths.any()

    def row(self, index: int) -> FixedCache:
        """Return row `index` as a cache of batch size 1 over the same memory. Raises EngineError on a GPU."""
        return self.rows(range(index, index + 1))

    def rows(self, run: range) -> FixedCache:
        """Return consecutive rows as a cache over the same memory. Raises EngineError on a GPU."""
        if not self.buffers:
            raise EngineError(
                "a GPU takes several tokens on a cache that is not empty for one row only; feed one a step"
            )
        rows = slice(run.start, run.stop)
        return self._over(self.session, [buffer[rows] for buffer in self.buffers], self.lengths[rows])

    def reorder(self, sources: Sequence[int]) -> None:
        """Let row i hold what row sources[i] held; the batch then has len(sources) rows, at most max_batch_size.

        If the number of rows changes, bound forwards must be rebuilt. On a GPU the cache passes through the CPU.
        """
        count, lengths = len(sources), self.lengths[list(sources)]
        if not self.buffers:
            for index, value in enumerate(self.values if list(sources) != list(range(self.batch_size)) else ()):
                moved = value.numpy()[list(sources)]
                if count == self.batch_size:
                    value.update_inplace(moved)  # bound forwards stay valid
                else:
                    self.values[index] = self.session.copy_in(moved)
        else:
            moves = [(row, source) for row, source in enumerate(sources) if row != source]
            if moves:
                rows, origins = map(list, zip(*moves, strict=True))
                tokens = int(lengths[rows].max())
                for buffer in self._whole:
                    buffer[rows, :, :tokens] = buffer[origins, :, :tokens]
            if count != self.batch_size:
                self.buffers = [buffer[:count] for buffer in self._whole]
                self.values = [self.session.share(buffer) for buffer in self.buffers]
        self.lengths = lengths

    def crop(self, tokens: int) -> None:
        """Let the only row hold its first `tokens` tokens."""
        self.lengths[0] = tokens

    def read_row(self, row: int) -> list[npt.NDArray[Any]]:
        """Return copies of a row's keys and values, (n_head, tokens, head_dim) for each layer and kind."""
        tokens = int(self.lengths[row])
        return [buffer[row, :, :tokens].copy() for buffer in self.buffers or [each.numpy() for each in self.values]]

    def load_rows(self, rows: Sequence[RowKV | None]) -> None:
        """Let each row of an empty cache hold what read_row() returned, or nothing."""
        arrays = self.buffers or [each.numpy() for each in self.values]
        for row, row_kv in enumerate(rows):
            for array, part in zip(arrays, row_kv or (), strict=row_kv is not None):
                array[row, :, : part.shape[1]] = part
            self.lengths[row] = row_kv[0].shape[1] if row_kv else 0
        if not self.buffers:
            self.values = [self.session.copy_in(array) for array in arrays]


class GrowingCache:
    """Keys and values of a batch, (batch_size, n_head, slots, head_dim) for each layer, replaced by each forward.

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
    def allocate(cls, session: Session, kv: KVShape, *, batch_size: int) -> GrowingCache:
        """Make an empty cache."""
        empty = np.zeros((batch_size, kv.n_head, 0, kv.head_dim), np.dtype(kv.dtype))
        values = [session.share(empty) for _ in past_names(kv.n_layer)]
        return cls(session, values, np.zeros((batch_size, 0), np.int64))

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let row i hold what row sources[i] held; the batch then has len(sources) rows."""
        rows = list(sources)
        if rows != list(range(self.batch_size)):
            self.values = [self.session.share(value.numpy()[rows]) for value in self.values]
            self.mask, self.lengths = self.mask[rows], self.lengths[rows]

    def crop(self, tokens: int) -> None:
        """Let the only row hold its first `tokens` tokens."""
        if tokens != self.lengths[0]:
            slots = int(np.searchsorted(np.cumsum(self.mask[0]), tokens)) + 1 if tokens else 0
            self.values = [self.session.share(value.numpy()[:, :, :slots].copy()) for value in self.values]
            self.mask = self.mask[:, :slots]
            self.lengths[0] = tokens

    def read_row(self, row: int) -> list[npt.NDArray[Any]]:
        """Return copies of a row's keys and values, (n_head, tokens, head_dim) for each layer and kind."""
        slots = np.flatnonzero(self.mask[row])
        return [value.numpy()[row][:, slots] for value in self.values]

    def load_rows(self, rows: Sequence[RowKV | None]) -> None:
        """Let each row of an empty cache hold what read_row() returned, or nothing."""
        slots = max(row_kv[0].shape[1] if row_kv else 0 for row_kv in rows)
        self.mask = np.zeros((self.batch_size, slots), np.int64)
        for row, row_kv in enumerate(rows):
            self.lengths[row] = row_kv[0].shape[1] if row_kv else 0
            self.mask[row, : self.lengths[row]] = 1
        for index, value in enumerate(self.values):
            _, n_head, _, head_dim = value.shape()
            array = np.zeros((self.batch_size, n_head, slots, head_dim), np.dtype(self.session.cache.dtype))
            for row, row_kv in enumerate(rows):
                if row_kv:
                    array[row, :, : row_kv[index].shape[1]] = row_kv[index]
            self.values[index] = self.session.share(array)


Cache = FixedCache | GrowingCache
