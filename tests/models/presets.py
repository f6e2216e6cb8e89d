"""The shapes of the published GPT-2 networks, and of a small one."""

from __future__ import annotations

from collections.abc import Mapping

from ortgpt_models import GPTConfig

PRESETS: Mapping[str, GPTConfig] = {
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPTConfig(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPTConfig(n_embd=1600, n_layer=48, n_head=25),
    "minigpt": GPTConfig(n_embd=128, n_layer=4, n_head=4, n_positions=256),
}
