"""GPT-2 and GPT-1 in PyTorch: configuration, network, weights, training. Imports neither the exporter nor the runtime.

Names are imported on first use, so `ortgpt_models.errors` and `ortgpt_models.progress` import without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortgpt_models.classifier import ClassifierConfig as ClassifierConfig
    from ortgpt_models.classifier import GPTClassifier as GPTClassifier
    from ortgpt_models.config import GPTConfig as GPTConfig
    from ortgpt_models.errors import ModelError as ModelError
    from ortgpt_models.gpt import GPT as GPT
    from ortgpt_models.gpt import FullAttention as FullAttention
    from ortgpt_models.hf_checkpoint import load_gpt as load_gpt
    from ortgpt_models.hf_checkpoint import load_network as load_network
    from ortgpt_models.hf_checkpoint import save_gpt as save_gpt
    from ortgpt_models.hf_checkpoint import weight_files as weight_files
    from ortgpt_models.nanogpt import load_nanogpt as load_nanogpt

_MODULE_OF = {
    "ClassifierConfig": "classifier",
    "GPT": "gpt",
    "FullAttention": "gpt",
    "GPTClassifier": "classifier",
    "GPTConfig": "config",
    "ModelError": "errors",
    "load_gpt": "hf_checkpoint",
    "load_nanogpt": "nanogpt",
    "load_network": "hf_checkpoint",
    "save_gpt": "hf_checkpoint",
    "weight_files": "hf_checkpoint",
}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
