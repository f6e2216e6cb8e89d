"""Choose the device of a training, and check what it and the machine can do. Knows no network."""

from __future__ import annotations

import os
import shutil
import sys

import torch

from ortgpt_models.errors import ModelError

# Names of torch.cpu.get_capabilities() for products of bfloat16, on x86 and on ARM.
_BFLOAT16_OF_CPUS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


# What torch.compile builds its code with, unless the environment variable CXX names another.
_COMPILERS = {"darwin": "clang++", "win32": "cl"}


def choose_device(name: str, *, bfloat16: bool = False, compiles: bool = False) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" stands for.

    Raises ModelError for cuda if PyTorch has none; with `bfloat16`, also for a device without instructions for its
    products, which PyTorch would emulate; and where the training `compiles`, without a C++ compiler.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ModelError(
            f"device = cuda: PyTorch {torch.__version__} finds no GPU; install a build of PyTorch for CUDA and the "
            "driver, or take cpu"
        )
    device = torch.device("cuda" if has_cuda and name != "cpu" else "cpu")
    if bfloat16 and not _has_bfloat16(device):
        raise ModelError(
            f"bfloat16: this {device.type} has no instructions for it, so it would be slower than float32; leave it out"
        )
    compiler = os.environ.get("CXX") or _COMPILERS.get(sys.platform, "g++")
    if compiles and shutil.which(compiler) is None:
        raise ModelError(
            f"compile: torch.compile needs a C++ compiler, and {compiler} is not installed; install it, name another "
            "in the environment variable CXX, or leave it out"
        )
    return device


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _BFLOAT16_OF_CPUS)
