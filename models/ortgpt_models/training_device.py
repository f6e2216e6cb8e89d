"""Choose the device of a training, and check what it can multiply in. Knows no network."""

from __future__ import annotations

import torch

from ortgpt_models.errors import ModelError


def choose_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" stands for. Raises ModelError for cuda if PyTorch has none."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ModelError(
            f"device = cuda: PyTorch {torch.__version__} finds no GPU; install a build of PyTorch for CUDA and the "
            "driver, or take cpu"
        )
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def check_bfloat16(device: torch.device) -> None:
    """Raise ModelError if the device has no instructions for products of bfloat16; PyTorch would emulate them."""
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    if not has_bfloat16:
        raise ModelError(
            f"bfloat16: this {device.type} has no instructions for it, so it would be slower than float32; leave it out"
        )
