"""Move magnitude between activations and the weights that multiply them, so that both survive rounding.

GPT-2 has channels with a LayerNorm gain many times that of the others, and weights smaller by the same factor: neither
fits a block of integers. Each channel is scaled so that the ratio of its activation to its weight is that of the median
channel (Xiao et al. 2023, SmoothQuant, arXiv:2211.10438, at α = 0.5). The size of an activation is estimated from the
weights before it, so no text is needed. The network's function stays the same. Knows no graph and no rounding.

With post-norm (GPT-1), only the values are scaled, which attn.c_proj alone reads. There, the output of a LayerNorm goes
not only to c_fc or to the next c_attn, but also to the residual addition after it, so another gain would change the
network.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
import numpy.typing as npt

from ortgpt.contract import Norm
from ortgpt_exporter.quantization.recipe import EMBEDDING, POSITIONS

Floats = npt.NDArray[np.float32]
Weights = MutableMapping[str, Floats]

_MIN_SIZE = np.float32(1e-30)  # a channel below this is taken for zero


def smooth(weights: Weights, *, n_layer: int, norm: str, min_factor: float) -> None:
    """Scale the channels before attn.c_proj of each layer, and with pre-norm those before c_attn and c_fc, in place.

    `weights` has the tensors of a network by their names in `GPT`, matrices as (in, out). `norm` is the place of the
    LayerNorm, "pre" or "post". A channel stays unchanged if its factor lies between 1 / `min_factor` and `min_factor`.
    """
    for layer in range(n_layer):
        # The values come first, because the factors of the LayerNorm before them depend on their columns.
        attn = f"h.{layer}.attn"
        _smooth_values(weights, _size_before(weights, layer, norm), f"{attn}.c_attn", f"{attn}.c_proj", min_factor)
        for place, linear in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")) if norm == Norm.PRE else ():
            _smooth_norm(weights, f"h.{layer}.{place}", f"h.{layer}.{linear}", min_factor)


def _size_before(weights: Weights, layer: int, norm: str) -> Floats:
    """Return the typical size of each channel that c_attn of a layer multiplies."""
    if norm == Norm.PRE:
        return _size_after_norm(weights, f"h.{layer}.ln_1")
    if layer > 0:
        return _size_after_norm(weights, f"h.{layer - 1}.ln_2")
    size: Floats = np.sqrt(sum(np.square(weights[name]).mean(0) for name in (EMBEDDING, POSITIONS)))
    return size


def _smooth_norm(weights: Weights, norm: str, linear: str, min_factor: float) -> None:
    gain, bias, matrix = weights[f"{norm}.weight"], weights[f"{norm}.bias"], weights[f"{linear}.weight"]
    factors = _factors(_size_after_norm(weights, norm), np.abs(matrix).max(1), min_factor)
    weights[f"{norm}.weight"], weights[f"{norm}.bias"] = gain / factors, bias / factors
    weights[f"{linear}.weight"] = matrix * factors[:, None]


def _smooth_values(weights: Weights, before: Floats, c_attn: str, c_proj: str, min_factor: float) -> None:
    """Scale the values, the last third of c_attn's output, which attention only averages over positions.

    `before` is the typical size of each channel of c_attn's input.
    """
    matrix, bias, after = weights[f"{c_attn}.weight"], weights[f"{c_attn}.bias"], weights[f"{c_proj}.weight"]
    values = slice(2 * len(after), 3 * len(after))
    size = np.sqrt(np.square(before[:, None] * matrix[:, values]).sum(0)) + np.abs(bias[values])
    factors = _factors(size, np.abs(after).max(1), min_factor)
    matrix, bias = matrix.copy(), bias.copy()
    matrix[:, values] /= factors
    bias[values] /= factors
    weights[f"{c_attn}.weight"], weights[f"{c_attn}.bias"] = matrix, bias
    weights[f"{c_proj}.weight"] = after * factors[:, None]


def _size_after_norm(weights: Weights, norm: str) -> Floats:
    """Return the typical size of each channel after a LayerNorm, which normalises to mean 0 and variance 1."""
    size: Floats = np.abs(weights[f"{norm}.weight"]) + np.abs(weights[f"{norm}.bias"])
    return size


def _factors(activation: Floats, weight: Floats, min_factor: float) -> Floats:
    """Return the divisor of each channel's activation; it is 1 for a channel of zeros."""
    live = (activation > _MIN_SIZE) & (weight > _MIN_SIZE)
    factors = np.ones(len(weight), np.float32)
    if live.any():
        shares = np.sqrt(activation[live] / weight[live])
        factors[live] = shares / np.median(shares)
    factors[(factors < min_factor) & (factors > 1 / min_factor)] = 1
    return factors
