"""Round a weight matrix to a few bits, in blocks along its rows that share a scale. Knows no graph.

The methods are `scale-search` and `rtn`, which are this module's, and `k-quant` and `hqq` of ONNX Runtime's quantiser.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_LOST = 4.0  # times the squared error of rounding to nearest
_CHUNK = 2**16  # blocks that are worked on at once
_SHRINKS = np.linspace(0.7, 1.15, 19, dtype=np.float32)  # factors on the scale that are tried, in 4 bits


@dataclass(frozen=True)
class Blocks:
    """A matrix as unsigned integers (rows, blocks, block_size), value = (integer - zero point) × scale.

    `scales` are (rows, blocks); `zero_points` likewise, or None where they are all half of the range.
    """

    bits: int
    integers: Bytes
    scales: Floats
    zero_points: Bytes | None = None

    @property
    def block_size(self) -> int:
        return int(self.integers.shape[2])

    @property
    def packed_width(self) -> int:
        """The bytes of a packed block."""
        return self.block_size * self.bits // 8

    @property
    def row_scales(self) -> Floats | None:
        """The scale of each row, if these are several blocks a row around half of the range that share it."""
        same = self.zero_points is None and self.scales.shape[1] > 1 and (self.scales == self.scales[:, :1]).all()
        return np.ascontiguousarray(self.scales[:, 0]) if same else None

    def split(self, block_size: int) -> Blocks:
        """Return the same matrix in smaller blocks, which divide these."""
        parts = self.block_size // block_size
        return replace(
            self,
            integers=self.integers.reshape(len(self.integers), -1, block_size),
            scales=np.repeat(self.scales, parts, axis=1),
            zero_points=None if self.zero_points is None else np.repeat(self.zero_points, parts, axis=1),
        )

    def packed(self) -> Bytes:
        """Return the integers, two to a byte in 4 bits, the first in the low half: (rows, blocks, bytes)."""
        return _pack(self.integers, self.bits)

    def packed_zero_points(self) -> Bytes | None:
        """Return the zero points as packed() does, each row filled up to whole bytes: (rows, bytes)."""
        if self.zero_points is None:
            return None
        odd = self.zero_points.shape[1] % (8 // self.bits)
        return _pack(np.pad(self.zero_points, ((0, 0), (0, odd))), self.bits)

    def dequantized(self) -> Floats:
        """Return the matrix that the integers stand for, (rows, columns)."""
        zero = np.float32(2 ** (self.bits - 1)) if self.zero_points is None else self.zero_points[..., None]
        values: Floats = (self.integers - np.asarray(zero, np.float32)) * self.scales[..., None]
        return values.reshape(len(values), -1)


def quantize_blocks(matrix: Floats, *, bits: int, block_size: int, method: str) -> Blocks:
    """Round `matrix` (rows, columns), whose columns `block_size` divides, by one of METHODS."""
    rows = len(matrix)
    flat = np.ascontiguousarray(matrix).reshape(-1, block_size)
    parts = [METHODS[method](flat[start : start + _CHUNK], bits) for start in range(0, len(flat), _CHUNK)]
    zero_points = [part[2] for part in parts if part[2] is not None]
    return Blocks(
        bits=bits,
        integers=np.concatenate([part[0] for part in parts]).reshape(rows, -1, block_size),
        scales=np.concatenate([part[1] for part in parts]).reshape(rows, -1),
        zero_points=np.concatenate(zero_points).reshape(rows, -1) if zero_points else None,
    )


_Part = tuple[Bytes, Floats, Bytes | None]


def _scale_search(blocks: Floats, bits: int) -> _Part:
    """Symmetric: of several scales take the one with the least squared error, each refined by least squares."""
    blocks, size = _normalised(blocks)
    half = 2 ** (bits - 1)
    largest = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(1)][:, None]
    best_error = np.full((len(blocks), 1), np.inf, np.float32)
    best_scale = np.ones_like(best_error)
    best = np.zeros(blocks.shape, np.int8)
    for shrink in _SHRINKS if bits == 4 else _SHRINKS[12:13]:  # in 8 bits rounding costs less than the search finds
        # The signed largest value goes to -half, the one integer that has no positive twin.
        scale = np.where(largest == 0, np.float32(1), largest * shrink / -half)
        integers = np.clip(np.round(blocks / scale), -half, half - 1)
        norm = (integers * integers).sum(1, keepdims=True)
        fitted = np.divide((integers * blocks).sum(1, keepdims=True), norm, out=scale, where=norm > 0)
        error = np.square(integers * fitted - blocks).sum(1, keepdims=True)
        better = (error < best_error)[:, 0]
        best_error[better], best_scale[better] = error[better], fitted[better]
        best[better] = integers[better].astype(np.int8)
    return (best.astype(np.int16) + half).astype(np.uint8), (best_scale * size)[:, 0], None


def _round_to_nearest(blocks: Floats, bits: int) -> _Part:
    """Spread the integers evenly from the least to the largest value, zero among them."""
    blocks, size = _normalised(blocks)
    most = 2**bits - 1
    least, largest = (np.fmin(blocks.min(1), 0)[:, None], np.fmax(blocks.max(1), 0)[:, None])
    scales = np.where(largest > least, (largest - least) / most, np.float32(1)).astype(np.float32)
    zero_points = np.round(-least / scales)
    integers = np.clip(np.round(blocks / scales) + zero_points, 0, most)
    return integers.astype(np.uint8), (scales * size)[:, 0], zero_points[:, 0].astype(np.uint8)


def _normalised(blocks: Floats) -> tuple[Floats, Floats]:
    """Return blocks divided by their largest magnitudes, and these: no square of a number overflows or vanishes."""
    size = np.maximum(np.abs(blocks).max(1, keepdims=True), np.finfo(np.float32).tiny)
    return blocks / size, size


def _k_quant(blocks: Floats, bits: int) -> _Part:
    from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu

    with np.errstate(all="ignore"):  # blocks of one value
        return _or_nearest(blocks, bits, *quant_tensor_k_quant_cpu(blocks, bits, blocks.shape[1]))


def _hqq(blocks: Floats, bits: int) -> _Part:
    """Half-quadratic quantization (Badri and Shaji 2023), its zero points rounded, as the integer kernel wants them."""
    import torch

    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantizer

    root.setLevel(level)  # importing it sets these for the whole program
    root.handlers[:] = handlers
    found = HQQWeightOnlyQuantizer(None).quantize_internal(
        torch.from_numpy(blocks.copy()), bits=bits, group_size=blocks.shape[1]
    )
    _, scales, zero_points = (tensor.numpy().astype(np.float32) for tensor in found)
    most = 2**bits - 1
    zeros = np.clip(np.round(zero_points.reshape(-1, 1)), 0, most)
    integers = np.clip(np.round(blocks / scales.reshape(-1, 1)) + zeros, 0, most)
    return _or_nearest(blocks, bits, integers, scales, zeros)


def _or_nearest(blocks: Floats, bits: int, integers: Any, scales: Any, zero_points: Any) -> _Part:
    """Return what a library found, or rounding to nearest for the blocks that it lost.

    Its zero points are cut to the range of the integers, so a block far from zero is. What it minimises is not the
    squared error, so a somewhat larger one is no fault.
    """
    found = integers.astype(np.uint8), scales.astype(np.float32).reshape(-1), zero_points.astype(np.uint8).reshape(-1)
    nearest = _round_to_nearest(blocks, bits)
    lost = _squared_errors(blocks, *found) > _LOST * _squared_errors(blocks, *nearest)
    for array, better in zip(found, nearest, strict=True):
        assert better is not None
        array[lost] = better[lost]
    return found


def _squared_errors(blocks: Floats, integers: Bytes, scales: Floats, zero_points: Bytes | None) -> Floats:
    assert zero_points is not None
    unit, size = _normalised(blocks)
    with np.errstate(all="ignore"):
        values = (integers.astype(np.float32) - zero_points[:, None]) * (scales[:, None] / size)
        errors: Floats = np.nan_to_num(np.square(values - unit).sum(1), nan=np.inf)
    return errors


SEARCH = "scale-search"
METHODS: Mapping[str, Callable[[Floats, int], _Part]] = {
    SEARCH: _scale_search,
    "rtn": _round_to_nearest,
    "k-quant": _k_quant,
    "hqq": _hqq,
}


def _pack(integers: Bytes, bits: int) -> Bytes:
    return integers if bits == 8 else (integers[..., 0::2] | (integers[..., 1::2] << 4)).astype(np.uint8)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """Return the integers that packed() put together, (rows, bytes) to (rows, integers)."""
    return packed if bits == 8 else np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)
