"""GPT-2 in PyTorch: configuration, network, weights, training. Imports neither the exporter nor the runtime."""

from ortgpt_models.adapter import adapter_file, merge_adapter
from ortgpt_models.config import PRESETS, GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.gpt import GPT, FullAttention, KVCache
from ortgpt_models.nanogpt import load_nanogpt
from ortgpt_models.weights import load_config, load_gpt, save_gpt, weight_files

__all__ = [
    "GPT",
    "PRESETS",
    "FullAttention",
    "GPTConfig",
    "KVCache",
    "ModelError",
    "adapter_file",
    "load_config",
    "load_gpt",
    "load_nanogpt",
    "merge_adapter",
    "save_gpt",
    "weight_files",
]
