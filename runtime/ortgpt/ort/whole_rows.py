"""Matrices of a graph that no file holds: bytes with one scale for each row, made of integers in blocks.

Memory bandwidth limits a decode step, so its graph has the fewest bytes. Arithmetic limits a long prompt, and is
fastest where a row of activations and a row of the matrix have one scale each. Those bytes say no more than the
integers do, so they are made when the graph for prompts is opened, a few rows at a time.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.files import reading
from ortgpt.bundle.manifest import WholeRows
from ortgpt.errors import BundleError

Bytes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float32]
Packed = npt.NDArray[np.uint8]

_LEAST, _MOST = -128, 127  # of a signed byte
_CHUNK = 64  # rows whose weights are in memory at once


def read_whole_rows(folder: Path, matrix: WholeRows) -> tuple[Bytes, Scales]:
    """Return the bytes (columns, rows) and scales (rows,) of a matrix. Raises BundleError if the file is too short."""
    if matrix.bits not in (4, 8) or min(matrix.rows, matrix.columns, matrix.block_size) < 1:
        raise BundleError(
            f"{matrix.name} has {matrix.rows} rows of {matrix.columns} weights in blocks of {matrix.block_size}, "
            f"{matrix.bits} bits each (accepted: 4 or 8 bits, and sizes of 1 or more)"
        )
    blocks = -(-matrix.columns // matrix.block_size)
    packed = (matrix.rows, blocks, matrix.block_size * matrix.bits // 8)
    path = folder / matrix.file
    integers = _read(path, matrix.name, "u1", packed, matrix.integers)
    scales = _read(path, matrix.name, "<f4", packed[:2], matrix.scales)
    return whole_rows(integers, scales, bits=matrix.bits, columns=matrix.columns)


def _read(path: Path, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> npt.NDArray[Any]:
    count = int(np.prod(shape))
    with reading(path):
        found = np.fromfile(path, dtype, count, offset=begin)
    if found.size != count:
        raise BundleError(f"{path} ends before the weights of {name}; export the checkpoint again")
    return found.reshape(shape)


def whole_rows(packed: Packed, scales: Scales, *, bits: int, columns: int) -> tuple[Bytes, Scales]:
    """Return signed bytes (columns, rows), and a scale for each row, of a matrix in blocks.

    `packed` is uint8 (rows, blocks, bytes), with two integers to a byte in 4 bits, the first in the low half; the
    integer for zero is the middle of their range. `scales` is float32 (rows, blocks). The largest magnitude of a row
    goes to -128, and the scale is the one with the least squared error; of a row of zeros, it is 0.
    """
    rows = len(packed)
    # Pages of its own, which go back to the system when it is freed.
    bytes_ = np.frombuffer(mmap.mmap(-1, columns * rows), np.int8).reshape(columns, rows)
    row_scales = np.empty(rows, np.float32)
    for begin in range(0, rows, _CHUNK):
        chunk = slice(begin, begin + _CHUNK)
        weights = _integers(packed[chunk], bits).astype(np.float32)
        weights -= 2 ** (bits - 1)
        weights *= scales[chunk, :, None]
        flat = weights.reshape(len(weights), -1)[:, :columns]
        largest = flat[np.arange(len(flat)), np.abs(flat).argmax(axis=1)]
        flat *= np.divide(_LEAST, largest, out=np.zeros_like(largest), where=largest != 0)[:, None]
        nearest = np.rint(flat)
        np.minimum(nearest, _MOST, out=nearest)  # 128 is what may stand opposite to the largest magnitude
        norms = np.einsum("ij,ij->i", nearest, nearest)
        fits = np.divide(np.einsum("ij,ij->i", nearest, flat), norms, out=np.zeros_like(norms), where=norms > 0)
        row_scales[chunk] = fits * largest / _LEAST
        bytes_[:, chunk] = nearest.T
    return bytes_, row_scales


def _integers(packed: Packed, bits: int) -> Packed:
    """Return one integer to a byte, (rows, blocks, block_size)."""
    if bits == 8:
        return packed
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:2], -1)
