"""The shapes of the published networks, and of the small one that a training makes by default. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from ortgpt_models.config import POST, GPTConfig

MINIGPT = "minigpt"
PRESETS: Mapping[str, GPTConfig] = {
    MINIGPT: GPTConfig(vocab_size=4096, n_positions=256, n_embd=256, n_layer=6, n_head=4),
    "gpt1": GPTConfig(vocab_size=40478, n_positions=512, norm=POST, bos_token_id=None, eos_token_id=None),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPTConfig(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPTConfig(n_embd=1600, n_layer=48, n_head=25),
}
# The largest learning rate of each: GPT-1's from its paper (Radford et al. 2018); GPT-2's, which no paper states, are
# those of GPT-3's networks of the same sizes (Brown et al. 2020, table 2.1).
LEARNING_RATES: Mapping[str, float] = {
    MINIGPT: 1.5e-3,
    "gpt1": 2.5e-4,
    "gpt2": 6e-4,
    "gpt2-medium": 3e-4,
    "gpt2-large": 2.5e-4,
    "gpt2-xl": 2e-4,
}
