"""The activations of `transformers` by their names there. Knows no network."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortgpt_models.config import ERF_GELUS, TANH_GELUS


class Elementwise(nn.Module):
    """A module without weights that applies `function`."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to one of the same shape."""
        return self.function(x)


def make_activation(name: str) -> nn.Module:
    """Return the module for one of config.ACTIVATIONS; it computes what `transformers` computes by that name."""
    return _MODULES[name]()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_10(x: Tensor) -> Tensor:
    return torch.clip(F.gelu(x), -10, 10)


def _laplace(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def _relu2(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _sqrtsoftplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


_MODULES: dict[str, Callable[[], nn.Module]] = {
    # The constant of gelu_fast, 0.7978845608, is that of the others in float32.
    **dict.fromkeys(TANH_GELUS, lambda: nn.GELU(approximate="tanh")),
    **dict.fromkeys(ERF_GELUS, nn.GELU),
    "gelu_10": lambda: Elementwise(_gelu_10),
    "quick_gelu": lambda: Elementwise(_quick_gelu),
    "relu": nn.ReLU,
    "relu2": lambda: Elementwise(_relu2),
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "laplace": lambda: Elementwise(_laplace),
    "sqrtsoftplus": lambda: Elementwise(_sqrtsoftplus),
    "linear": nn.Identity,
}
