"""How to train a language model: the shape of the network, then the optimisation. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortgpt_models.config import GPTConfig
from ortgpt_models.settings import check_settings, setting


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Say how to train: the shape of the network, then the optimisation (AdamW, linear warm-up, cosine to zero).

    The metadata of each field has its meaning as "help". Raises ModelError naming every field out of range.
    """

    n_layer: int = setting(6, "Number of layers.", least=1)
    n_head: int = setting(4, "Attention heads in a layer.", least=1)
    n_embd: int = setting(256, "Width of the residual stream, a multiple of the number of heads.", least=1)
    n_positions: int = setting(256, "Context length in tokens; each training window has this length.", least=1)
    vocab_size: int = setting(4096, "Tokens of the byte-level BPE, end-of-text included.", least=257)
    dropout: float = setting(0.1, "Dropout on the embeddings and the residual branches, below 1.")
    steps: int = setting(2000, "Number of optimiser steps.", least=1)
    batch_size: int = setting(16, "Windows in a step.", least=1)
    learning_rate: float = setting(1.5e-3, "Largest learning rate, after the warm-up.", above=0)
    warmup_steps: int = setting(100, "Steps of linear warm-up.")
    weight_decay: float = setting(0.1, "Weight decay of the matrices; biases and LayerNorms have none.")
    clip_norm: float = setting(1.0, "Largest norm of the gradient; a longer one is scaled down to it.", above=0)
    seed: int = setting(0, "Seed of every random choice.", most=2**32 - 1)
    bfloat16: bool = setting(False, "Multiply matrices in bfloat16, which is faster on CPUs that support it.")
    evaluate_every: int = setting(250, "Steps between two measurements on the held-out text.", least=1)
    save_every: int = setting(100, "Steps between two saved states.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        self.gpt_config(end_of_text_id=0)

    def gpt_config(self, *, end_of_text_id: int) -> GPTConfig:
        """Return the configuration of the network to train."""
        return GPTConfig(
            vocab_size=self.vocab_size,
            n_positions=self.n_positions,
            n_embd=self.n_embd,
            n_layer=self.n_layer,
            n_head=self.n_head,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=0.0,
            bos_token_id=end_of_text_id,
            eos_token_id=end_of_text_id,
        )

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of `step` (counted from 0): linear warm-up, then half a cosine down to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
