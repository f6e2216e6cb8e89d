"""Move magnitude between activations and the weights behind them, so that both survive rounding.

What a channel carries is its activation times its weight. GPT-2 has channels whose LayerNorm gain is many times the
others' and whose weights are as much smaller: neither fits a block of integers. A channel is scaled so that activation
and weight share what it carries as the median channel does (Xiao et al. 2023, SmoothQuant, at α = 0.5). The size of an
activation is read off the weights before it, so no text is needed. The function stays the same.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Weights = MutableMapping[str, Floats]

_LEAST = np.float32(1e-30)


def smooth(weights: Weights, *, n_layer: int, least_factor: float) -> None:
    """Balance the channels before c_attn, c_fc and attn.c_proj of each layer, in place.

    Channels whose factor would lie between 1 / `least_factor` and `least_factor` stay as they are.
    `weights` has the tensors of a network by their names in a checkpoint, matrices as (in, out).
    """
    for layer in range(n_layer):
        # The values first: their columns are part of what the LayerNorm before them is balanced against.
        attn = f"h.{layer}.attn"
        _smooth_values(weights, f"h.{layer}.ln_1", f"{attn}.c_attn", f"{attn}.c_proj", least_factor)
        for norm, linear in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            _smooth_norm(weights, f"h.{layer}.{norm}", f"h.{layer}.{linear}", least_factor)


def _smooth_norm(weights: Weights, norm: str, linear: str, least_factor: float) -> None:
    gain, bias, matrix = weights[f"{norm}.weight"], weights[f"{norm}.bias"], weights[f"{linear}.weight"]
    factors = _factors(_size_after_norm(gain, bias), np.abs(matrix).max(1), least_factor)
    weights[f"{norm}.weight"], weights[f"{norm}.bias"] = gain / factors, bias / factors
    weights[f"{linear}.weight"] = matrix * factors[:, None]


def _smooth_values(weights: Weights, norm: str, c_attn: str, c_proj: str, least_factor: float) -> None:
    """The values are a third of what c_attn computes; attention only averages them over positions."""
    matrix, bias, after = weights[f"{c_attn}.weight"], weights[f"{c_attn}.bias"], weights[f"{c_proj}.weight"]
    values = slice(2 * len(after), 3 * len(after))
    before = _size_after_norm(weights[f"{norm}.weight"], weights[f"{norm}.bias"])
    size = np.sqrt(np.square(before[:, None] * matrix[:, values]).sum(0)) + np.abs(bias[values])
    factors = _factors(size, np.abs(after).max(1), least_factor)
    matrix, bias = matrix.copy(), bias.copy()
    matrix[:, values] /= factors
    bias[values] /= factors
    weights[f"{c_attn}.weight"], weights[f"{c_attn}.bias"] = matrix, bias
    weights[f"{c_proj}.weight"] = after * factors[:, None]


def _size_after_norm(gain: Floats, bias: Floats) -> Floats:
    """Return the typical size of each channel behind a LayerNorm, whose input has mean 0 and variance 1."""
    size: Floats = np.abs(gain) + np.abs(bias)
    return size


def _factors(activation: Floats, weight: Floats, least_factor: float) -> Floats:
    """Return what to divide each channel's activation by; a channel that carries nothing stays."""
    live = (activation > _LEAST) & (weight > _LEAST)
    factors = np.ones(len(weight), np.float32)
    if live.any():
        shares = np.sqrt(activation[live] / weight[live])
        factors[live] = shares / np.median(shares)
    factors[(factors < least_factor) & (factors > 1 / least_factor)] = 1
    return factors
