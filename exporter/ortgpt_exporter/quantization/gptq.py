"""Round a matrix so that its products with the activations of a text change least. Knows no graph and no text.

GPTQ (Frantar et al. 2023, arXiv:2210.17323): columns are rounded one after another, and the columns that are not
rounded yet compensate the error. The scale of a block is searched for when its turn comes, on the compensated weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ortgpt_exporter.quantization.blocks import Blocks, Floats, padded, quantize_blocks

_DAMPING = 0.01  # of the mean diagonal, as in the paper


def quantize_gptq(matrix: Floats, hessian: npt.NDArray[np.float64], *, bits: int, block_size: int) -> Blocks:
    """Round `matrix` (rows, columns) in blocks.

    `hessian` (columns, columns) is XᵀX of the activations X (tokens, columns) that the matrix multiplies.
    """
    factor = _inverse_factor(np.pad(hessian, (0, -len(hessian) % block_size)))
    half = 2 ** (bits - 1)
    weights = padded(matrix.astype(np.float32), block_size)  # a copy
    rows, width = weights.shape
    integers = np.empty((rows, width // block_size, block_size), np.uint8)
    scales = np.empty((rows, width // block_size), np.float32)
    for number, begin in enumerate(range(0, width, block_size)):
        end = begin + block_size
        block = weights[:, begin:end]
        scale = quantize_blocks(block, bits=bits, block_size=block_size).scales[:, 0]
        divisor = np.where(scale == 0, np.float32(1), scale)
        errors = np.empty_like(block)
        for column in range(block_size):
            integer = np.clip(np.round(block[:, column] / divisor), -half, half - 1)
            integers[:, number, column] = integer + half
            place = begin + column
            errors[:, column] = (block[:, column] - integer * scale) / factor[place, place]
            block[:, column + 1 :] -= errors[:, column, None] * factor[place, place + 1 : end]
        weights[:, end:] -= errors @ factor[begin:end, end:]
        scales[:, number] = scale
    return Blocks.pack(integers, scales, bits=bits, columns=matrix.shape[1])


def _inverse_factor(hessian: npt.NDArray[np.float64]) -> Floats:
    """Return the upper Cholesky factor of the damped inverse; a channel that is always zero compensates nothing."""
    damped = hessian.copy()
    diagonal = np.diag(damped)
    mean = diagonal.mean() or 1.0
    damped[np.diag_indices_from(damped)] += np.where(diagonal == 0, mean, _DAMPING * mean)
    factor: Floats = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return factor
