"""GPT-2 in PyTorch: configuration, network, weights, training. Imports neither the exporter nor the runtime.

Names are imported on first use, so `ortgpt_models.errors` and `ortgpt_models.progress` import without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortgpt_models.config import PRESETS, GPTConfig
    from ortgpt_models.errors import ModelError
    from ortgpt_models.gpt import GPT, FullAttention
    from ortgpt_models.hf_checkpoint import load_config, load_gpt, save_gpt, weight_files
    from ortgpt_models.nanogpt import load_nanogpt

__all__ = [
    "GPT",
    "PRESETS",
    "FullAttention",
    "GPTConfig",
    "ModelError",
    "load_config",
    "load_gpt",
    "load_nanogpt",
    "save_gpt",
    "weight_files",
]

_MODULE_OF = {
    "GPT": "gpt",
    "PRESETS": "config",
    "FullAttention": "gpt",
    "GPTConfig": "config",
    "ModelError": "errors",
    "load_config": "hf_checkpoint",
    "load_gpt": "hf_checkpoint",
    "load_nanogpt": "nanogpt",
    "save_gpt": "hf_checkpoint",
    "weight_files": "hf_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
