"""The key-value cache of one generation: who owns which memory, and how many tokens each row holds.

A fixed cache is one buffer a layer that the graph updates in place: bound as past and as present, it is the same
memory, so a step moves no cache. Knows no token and no text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.contract import Tensor, past_names, present_names
from ortgpt.session import Session

_ROUND_TO = 64  # positions; keeps the number of different buffer shapes small


class FixedCache:
    """Keys and values of a batch: (batch_size, n_head, capacity, head_dim) a layer, updated in place.

    `lengths`, int32 (batch_size), counts the tokens each row holds. Rows are independent: a row's slots beyond its
    length are never read, whatever they hold.
    """

    def __init__(self, buffers: list[npt.NDArray[Any]], lengths: npt.NDArray[np.int32]) -> None:
        self.buffers = buffers
        self.lengths = lengths

    @classmethod
    def allocate(cls, session: Session, *, n_layer: int, n_head: int, batch_size: int, tokens: int) -> FixedCache:
        """Make an empty cache with room for `tokens` positions a row, rounded up."""
        capacity = -(-tokens // _ROUND_TO) * _ROUND_TO
        spec = session.graph.cache
        shape = (batch_size, n_head, capacity, spec.head_dim)
        buffers = [np.empty(shape, np.dtype(spec.dtype)) for _ in past_names(n_layer)]
        return cls(buffers, np.zeros(batch_size, np.int32))

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """The number of positions a row has room for."""
        return int(self.buffers[0].shape[2])

    def row(self, index: int) -> FixedCache:
        """Return row `index` as a cache of batch size 1 over the same memory."""
        rows = slice(index, index + 1)
        return FixedCache([buffer[rows] for buffer in self.buffers], self.lengths[rows])

    def bind(self, session: Session, binding: Any) -> ValidLengths:
        """Bind the buffers as past and present, and the inputs that tell the operator how much of a row is valid."""
        ort_value = session.onnxruntime.OrtValue.ortvalue_from_numpy
        n_layer = len(self.buffers) // 2
        for past, present, buffer in zip(past_names(n_layer), present_names(n_layer), self.buffers, strict=True):
            value = ort_value(buffer)
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        valid = ValidLengths(self.batch_size)
        binding.bind_ortvalue_input(Tensor.SEQLENS_K, ort_value(valid.seqlens_k))
        binding.bind_ortvalue_input(Tensor.TOTAL_SEQUENCE_LENGTH, ort_value(valid.total))
        return valid


class ValidLengths:
    """The operator's two length inputs, bound once and written before each run."""

    def __init__(self, batch_size: int) -> None:
        self.seqlens_k = np.zeros(batch_size, np.int32)
        self.total = np.zeros((), np.int32)

    def set(self, lengths: npt.NDArray[np.int32], total: int) -> None:
        """Announce the tokens each row will hold after the run, and the positions of the longest, padding included."""
        np.subtract(lengths, 1, out=self.seqlens_k)
        self.total[...] = total
