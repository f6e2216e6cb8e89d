"""Move magnitude between activations and the weights that multiply them, so that both survive rounding.

GPT-2 has channels with a LayerNorm gain many times that of the others, and weights smaller by the same factor: neither
fits a block of integers. Each channel is scaled so that the ratio of its activation to its weight is that of the median
channel (Xiao et al. 2023, SmoothQuant, arXiv:2211.10438, at α = 0.5). The size of an activation is estimated from the
weights before it, so no text is needed. The network's function stays the same. Knows no graph and no rounding.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Weights = MutableMapping[str, Floats]

_MIN_SIZE = np.float32(1e-30)  # a channel below this is taken for zero


def smooth(weights: Weights, *, n_layer: int, min_factor: float) -> None:
    """Scale the channels before c_attn, c_fc and attn.c_proj of each layer, in place.

    `weights` has the tensors of a network by their names in a checkpoint, matrices as (in, out). A channel stays
    unchanged if its factor lies between 1 / `min_factor` and `min_factor`.
    """
    for layer in range(n_layer):
        # The values come first, because the factors of the LayerNorm before them depend on their columns.
        attn = f"h.{layer}.attn"
        _smooth_values(weights, f"h.{layer}.ln_1", f"{attn}.c_attn", f"{attn}.c_proj", min_factor)
        for norm, linear in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            _smooth_norm(weights, f"h.{layer}.{norm}", f"h.{layer}.{linear}", min_factor)


def _smooth_norm(weights: Weights, norm: str, linear: str, min_factor: float) -> None:
    gain, bias, matrix = weights[f"{norm}.weight"], weights[f"{norm}.bias"], weights[f"{linear}.weight"]
    factors = _factors(_size_after_norm(gain, bias), np.abs(matrix).max(1), min_factor)
    weights[f"{norm}.weight"], weights[f"{norm}.bias"] = gain / factors, bias / factors
    weights[f"{linear}.weight"] = matrix * factors[:, None]


def _smooth_values(weights: Weights, norm: str, c_attn: str, c_proj: str, min_factor: float) -> None:
    """Scale the values, the last third of c_attn's output, which attention only averages over positions."""
    matrix, bias, after = weights[f"{c_attn}.weight"], weights[f"{c_attn}.bias"], weights[f"{c_proj}.weight"]
    values = slice(2 * len(after), 3 * len(after))
    before = _size_after_norm(weights[f"{norm}.weight"], weights[f"{norm}.bias"])
    size = np.sqrt(np.square(before[:, None] * matrix[:, values]).sum(0)) + np.abs(bias[values])
    factors = _factors(size, np.abs(after).max(1), min_factor)
    matrix, bias = matrix.copy(), bias.copy()
    matrix[:, values] /= factors
    bias[values] /= factors
    weights[f"{c_attn}.weight"], weights[f"{c_attn}.bias"] = matrix, bias
    weights[f"{c_proj}.weight"] = after * factors[:, None]


def _size_after_norm(gain: Floats, bias: Floats) -> Floats:
    """Return the typical size of each channel after a LayerNorm, which normalises to mean 0 and variance 1."""
    size: Floats = np.abs(gain) + np.abs(bias)
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
