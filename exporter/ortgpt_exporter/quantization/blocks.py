"""Round a weight matrix to 8 or 4 bits, in blocks along its rows that share a scale. Knows no graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_CHUNK = 2**16  # blocks that are rounded at once
_SHRINKS = np.linspace(0.7, 1.15, 19, dtype=np.float32)  # factors on the scale that are tried in 4 bits


@dataclass(frozen=True)
class Blocks:
    """A matrix of integers in blocks along its rows: weight = (integer - half of the range) × scale of its block.

    If the last block is longer than the rest of the row, it ends with integers for zero.
    """

    bits: int
    """8 or 4."""
    packed: Bytes
    """The integers, (rows, blocks, bytes): one to a byte, or in 4 bits two to a byte, the first in the low half."""
    scales: Floats
    """The scale of each block, (rows, blocks)."""
    columns: int
    """The length of a row, without what the last block has beyond it."""

    @classmethod
    def pack(cls, integers: Bytes, scales: Floats, *, bits: int, columns: int | None = None) -> Blocks:
        """Pack unsigned integers (rows, blocks, block_size); by default no block is padded."""
        _, count, block_size = integers.shape
        return cls(bits, _pack(integers, bits), scales, count * block_size if columns is None else columns)

    @property
    def integers(self) -> Bytes:
        """The integers, one to a byte: (rows, blocks, block_size)."""
        if self.bits == 8:
            return self.packed
        halves = np.stack((self.packed & 15, self.packed >> 4), axis=-1)
        return halves.reshape(*self.scales.shape, self.block_size)

    @property
    def block_size(self) -> int:
        """How many weights share a scale."""
        return int(self.packed.shape[2]) * 8 // self.bits

    def dequantized(self) -> Floats:
        """Return the weights that the integers represent, (rows, columns)."""
        values: Floats = (self.integers - np.float32(2 ** (self.bits - 1))) * self.scales[..., None]
        return values.reshape(len(values), -1)[:, : self.columns]


def padded(matrix: npt.NDArray[Any], block_size: int, *, value: int = 0) -> npt.NDArray[Any]:
    """Return `matrix` with each row padded by `value` up to a whole number of blocks."""
    missing = -matrix.shape[1] % block_size
    return np.pad(matrix, ((0, 0), (0, missing)), constant_values=value) if missing else matrix


def quantize_blocks(matrix: Floats, *, bits: int, block_size: int) -> Blocks:
    """Round `matrix` (rows, columns) to 8 or 4 bits.

    In 4 bits several scales are tried for each block, and the one with the least squared error is taken.
    """
    rows, columns = matrix.shape
    flat = np.ascontiguousarray(padded(matrix, block_size)).reshape(-1, block_size)
    parts = [_search_scales(flat[start : start + _CHUNK], bits) for start in range(0, len(flat), _CHUNK)]
    packed = np.concatenate([_pack(integers, bits) for integers, _ in parts])
    scales = np.concatenate([scales for _, scales in parts])
    return Blocks(bits, packed.reshape(rows, -1, packed.shape[1]), scales.reshape(rows, -1), columns)


def _search_scales(blocks: Floats, bits: int) -> tuple[Bytes, Floats]:
    """Return the integers (blocks, block_size) and the scale of each block, refined by least squares."""
    # Blocks are divided by their largest magnitudes, so that no square of a number overflows or vanishes.
    size = np.maximum(np.abs(blocks).max(1, keepdims=True), np.finfo(np.float32).tiny)
    blocks = blocks / size
    half = 2 ** (bits - 1)
    largest = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(1)][:, None]
    best_error = np.full((len(blocks), 1), np.inf, np.float32)
    best_scale = np.ones_like(best_error)
    best = np.zeros(blocks.shape, np.int8)
    for shrink in _SHRINKS if bits == 4 else _SHRINKS[12:13]:  # in 8 bits a search gains less than it costs
        # The largest magnitude goes to -half, the one integer that has no positive twin.
        scale = np.where(largest == 0, np.float32(1), largest * shrink / -half)
        integers = np.clip(np.round(blocks / scale), -half, half - 1)
        norm = (integers * integers).sum(1, keepdims=True)
        fitted = np.divide((integers * blocks).sum(1, keepdims=True), norm, out=scale, where=norm > 0)
        error = np.square(integers * fitted - blocks).sum(1, keepdims=True)
        better = (error < best_error)[:, 0]
        best_error[better], best_scale[better] = error[better], fitted[better]
        best[better] = integers[better].astype(np.int8)
    return (best.astype(np.int16) + half).astype(np.uint8), (best_scale * size)[:, 0]


def _pack(integers: Bytes, bits: int) -> Bytes:
    return integers if bits == 8 else (integers[..., 0::2] | (integers[..., 1::2] << 4)).astype(np.uint8)
