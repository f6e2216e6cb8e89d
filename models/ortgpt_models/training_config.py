"""How to train a language model: the shape of the network, then the optimisation. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ortgpt_models.config import POST, PRE, GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.presets import LEARNING_RATES, MINIGPT, PRESETS
from ortgpt_models.settings import check_settings, setting

# Where a training starts from a checkpoint: the default of the Trainer of `transformers`; for a LoRA, what its paper
# used for GPT-2 (Hu et al. 2021, table 11).
FINE_TUNING_RATE = 5e-5
LORA_RATE = 2e-4
# The fields that say which network is made from scratch.
_SHAPE = (
    "preset", "norm", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "residual_scaling",
)  # fmt: skip
_OF_PRESET = "[default: the preset's]"
_DROPOUT = 0.1
_RATES = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Say how to train: the shape of the network, then the optimisation (AdamW, linear warm-up, cosine to zero).

    The metadata of each field has its meaning as "help". Raises ModelError naming every field out of range.
    """

    preset: str | None = setting(
        None, f"The network whose shape to take. [default: {MINIGPT}]", kind=str, choices=tuple(PRESETS)
    )
    norm: str | None = setting(
        None,
        "LayerNorm before attention and MLP (pre, as in GPT-2), or after each residual addition (post, as in GPT-1). "
        f"{_OF_PRESET}",
        kind=str,
        choices=(PRE, POST),
    )
    n_layer: int | None = setting(None, f"Number of layers. {_OF_PRESET}", kind=int, least=1)
    n_head: int | None = setting(None, f"Attention heads in a layer. {_OF_PRESET}", kind=int, least=1)
    n_embd: int | None = setting(
        None, f"Width of the residual stream, a multiple of the number of heads. {_OF_PRESET}", kind=int, least=1
    )
    n_positions: int | None = setting(None, f"Context length in tokens. {_OF_PRESET}", kind=int, least=1)
    vocab_size: int | None = setting(
        None, f"Tokens of the byte-level BPE, end-of-text included. {_OF_PRESET}", kind=int, least=257
    )
    residual_scaling: bool | None = setting(
        None,
        "Divide the initial weights of the residual projections by the root of 2 n_layer, or do not. "
        "[default: with pre-norm]",
        kind=bool,
    )
    window: int | None = setting(
        None, "Tokens of a training window, at most the context length. [default: all of it]", kind=int, least=1
    )
    dropout: float | None = setting(
        None,
        "Dropout on the embeddings and the residual branches, below 1; the attention weights have none. "
        f"[default: {_DROPOUT}; with --from, the checkpoint's, on the attention weights too]",
        kind=float,
    )
    steps: int = setting(2000, "Number of optimiser steps.", least=1)
    batch_size: int = setting(16, "Windows that are computed at once.", least=1)
    gradient_accumulation_steps: int = setting(
        1, "Batches whose gradients are added up for a step: a larger batch in the same memory.", least=1
    )
    learning_rate: float | None = setting(
        None,
        f"Largest learning rate, after the warm-up. [default: {_RATES}; with --from {FINE_TUNING_RATE:g}, and "
        f"{LORA_RATE:g} for an adapter]",
        kind=float,
        above=0,
    )
    warmup_steps: int = setting(100, "Steps of linear warm-up.")
    weight_decay: float = setting(0.1, "Weight decay of the matrices; biases and LayerNorms have none.")
    clip_norm: float = setting(1.0, "Largest norm of the gradient; a longer one is scaled down to it.", above=0)
    seed: int = setting(0, "Seed of every random choice.", most=2**32 - 1)
    device: str = setting(
        "auto", "Device to train on; auto is cuda if PyTorch has it.", choices=("auto", "cpu", "cuda")
    )
    bfloat16: bool = setting(False, "Multiply matrices in bfloat16; refused on a device without instructions for it.")
    compile: bool = setting(
        False, "Compile the network by torch.compile, which takes minutes, for faster steps; needs a C++ compiler."
    )
    evaluate_every: int = setting(250, "Steps between two measurements on the held-out text.", least=1)
    save_every: int = setting(100, "Steps between two saved states.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        self.gpt_config(end_of_text_id=0)

    def refuse_shape(self) -> None:
        """Raise ModelError if a field of the shape was given, which a checkpoint to start from has."""
        given = {name: getattr(self, name) for name in _SHAPE if getattr(self, name) is not None}
        if given:
            raise ModelError(
                f"{', '.join(f'{name} = {value}' for name, value in given.items())} would have no effect: a checkpoint "
                "to start from has a shape of its own; leave it out, or train from scratch"
            )

    def resolved(self) -> TrainingConfig:
        """Return the same for a network from scratch, with every default filled in."""
        shape = self.gpt_config(end_of_text_id=0)
        preset = self.preset or MINIGPT
        return replace(
            self,
            preset=preset,
            norm=shape.norm,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            n_positions=shape.n_positions,
            vocab_size=shape.vocab_size,
            residual_scaling=shape.norm == PRE if self.residual_scaling is None else self.residual_scaling,
            window=self.window_of(shape.n_positions),
            dropout=shape.resid_pdrop,
            learning_rate=self.learning_rate or LEARNING_RATES[preset],
        )

    def resolved_from(self, n_positions: int, learning_rate: float) -> TrainingConfig:
        """Return the same for a checkpoint with this context; `learning_rate` is the default.

        Raises ModelError if a shape was given, or a window longer than the context.
        """
        self.refuse_shape()
        return replace(self, window=self.window_of(n_positions), learning_rate=self.learning_rate or learning_rate)

    def window_of(self, n_positions: int) -> int:
        """Return the length of a training window for a context of `n_positions`. Raises ModelError if it is longer."""
        if self.window is not None and self.window > n_positions:
            raise ModelError(f"window = {self.window} (accepted: at most the context, n_positions = {n_positions})")
        return self.window or n_positions

    def gpt_config(self, *, end_of_text_id: int) -> GPTConfig:
        """Return the configuration of the network to train from scratch."""
        given = {
            name: getattr(self, name)
            for name in ("norm", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size")
            if getattr(self, name) is not None
        }
        dropout = _DROPOUT if self.dropout is None else self.dropout
        return replace(
            PRESETS[self.preset or MINIGPT],
            **given,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=0.0,
            bos_token_id=end_of_text_id,
            eos_token_id=end_of_text_id,
        )

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of `step` (counted from 0): linear warm-up, then half a cosine down to zero."""
        assert self.learning_rate is not None, "the caller resolved it"
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
