"""The settings of a training, each declared once for its check and for its flag on the command line. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError

_LIMITS = ("least", "most", "above")


def _setting(default: Any, help: str, *, least: float = 0, most: float = math.inf, above: float = -1) -> Any:
    """Declare a setting that is accepted from `least`, and above `above`, to `most`."""
    return field(default=default, metadata={"help": help, "least": least, "most": most, "above": above})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Say how to train: the shape of the network, then the optimisation (AdamW, linear warm-up, cosine to zero).

    The metadata of each field has its meaning as "help". Raises ModelError naming every field out of range.
    """

    n_layer: int = _setting(6, "Number of layers.", least=1)
    n_head: int = _setting(4, "Attention heads in a layer.", least=1)
    n_embd: int = _setting(256, "Width of the residual stream, a multiple of the number of heads.", least=1)
    n_positions: int = _setting(256, "Context length in tokens; each training window has this length.", least=1)
    vocab_size: int = _setting(4096, "Tokens of the byte-level BPE, end-of-text included.", least=257)
    dropout: float = _setting(0.1, "Dropout on the embeddings and the residual branches, below 1.")
    steps: int = _setting(2000, "Number of optimiser steps.", least=1)
    batch_size: int = _setting(16, "Windows in a step.", least=1)
    learning_rate: float = _setting(1.5e-3, "Largest learning rate, after the warm-up.", above=0)
    warmup_steps: int = _setting(100, "Steps of linear warm-up.")
    weight_decay: float = _setting(0.1, "Weight decay of the matrices; biases and LayerNorms have none.")
    clip_norm: float = _setting(1.0, "Largest norm of the gradient; a longer one is scaled down to it.", above=0)
    seed: int = _setting(0, "Seed of every random choice.", most=2**32 - 1)
    bfloat16: bool = _setting(False, "Multiply matrices in bfloat16, which is faster on CPUs that support it.")
    evaluate_every: int = _setting(250, "Steps between two measurements on the held-out text.", least=1)
    save_every: int = _setting(100, "Steps between two saved states.", least=1)

    def __post_init__(self) -> None:
        faults = []
        for each in fields(self):
            value, least, most, above = getattr(self, each.name), *(each.metadata[key] for key in _LIMITS)
            if not (least <= value <= most and above < value < math.inf):
                accepted = f"{least} to {most}" if most < math.inf else f"{least} or more"
                faults.append(f"{each.name} = {value} (accepted: {'above 0' if above == 0 else accepted})")
        if faults:
            raise ModelError("unusable training configuration: " + "; ".join(faults))
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
