"""How to fine-tune a language model for a task; the defaults are GPT-1's (Radford et al. 2018). Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortgpt_models.settings import check_settings, setting


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """Say how to fine-tune: AdamW, linear warm-up, then linear decay to zero.

    The metadata of each field has its meaning as "help". Raises ModelError naming every field out of range.
    """

    epochs: int = setting(3, "Passes over the rows.", least=1)
    batch_size: int = setting(32, "Rows in a step.", least=1)
    learning_rate: float = setting(6.25e-5, "Largest learning rate, after the warm-up.", above=0)
    warmup_share: float = setting(0.002, "Share of the steps with linear warm-up.", most=1)
    weight_decay: float = setting(0.01, "Weight decay of the matrices; biases and LayerNorms have none.")
    clip_norm: float = setting(1.0, "Largest norm of the gradient; a longer one is scaled down to it.", above=0)
    dropout: float = setting(0.1, "Dropout on embeddings, attention weights and residual branches, below 1.", most=0.99)
    head_dropout: float = setting(0.1, "Dropout on the input of the new head, below 1.", most=0.99)
    aux_weight: float = setting(0.5, "Weight of the language-model loss beside the task's; 0 leaves it out.")
    held_out_share: float = setting(0.1, "Share of the rows to measure on, without a file of them.", above=0, most=0.9)
    evaluate_every: int = setting(0, "Steps between two measurements on the held-out rows; 0 means each epoch.")
    patience: int = setting(3, "Stop after this many measurements without a lower held-out loss; 0 means never.")
    seed: int = setting(0, "Seed of every random choice.", most=2**32 - 1)
    save_every: int = setting(100, "Steps between two saved states.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)

    def steps_per_epoch(self, rows: int) -> int:
        """Return how many steps a pass over `rows` takes; the last may have fewer rows."""
        return math.ceil(rows / self.batch_size)

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of `step` (counted from 0) of `steps`: linear warm-up, then linear decay to zero."""
        warmup = self.warmup_share * steps
        if step + 1 <= warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (steps - step) / max(1.0, steps - math.floor(warmup))
