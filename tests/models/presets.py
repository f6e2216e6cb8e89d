"""The shapes of the published networks, and of the small one that `ortgpt train` makes by default."""

from __future__ import annotations

from collections.abc import Mapping

from ortgpt_models import GPTConfig
from ortgpt_models.training_config import TrainingConfig

PRESETS: Mapping[str, GPTConfig] = {
    "gpt1": GPTConfig(vocab_size=40478, n_positions=512, norm="post", bos_token_id=None, eos_token_id=None),
    "gpt2": GPTConfig(),
    "gpt2-medium": GPTConfig(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPTConfig(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPTConfig(n_embd=1600, n_layer=48, n_head=25),
    "minigpt": TrainingConfig().gpt_config(end_of_text_id=0),
}
