"""What a training starts from: a network, its tokenizer, and how both are written. Makes the one from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortgpt_models.config import POST
from ortgpt_models.corpus import END_OF_TEXT, Texts, train_tokenizer
from ortgpt_models.gpt import GPT
from ortgpt_models.hf_checkpoint import save_gpt
from ortgpt_models.training_config import FINE_TUNING_RATE, TrainingConfig

# Without this, readers take the tokenizer beside a GPT-1 for GPT-1's own kind.
_GPT2_TOKENIZER = {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}


@dataclass(frozen=True)
class StartingPoint:
    """A network to train, with its tokenizer."""

    network: nn.Module
    """Maps token ids, int64 (batch, seq), to logits, (batch, seq, vocab_size). What requires no gradient stays."""
    _: KW_ONLY
    n_positions: int
    """Its context, in tokens."""
    encode: Callable[[str], Sequence[int]]
    """Turns a text into token ids."""
    end_of_text_id: int | None
    """The token that ends a document, if there is one."""
    write: Callable[[Path], None]
    """Writes the network as it is then, and the tokenizer, into an existing folder."""
    dtype: torch.dtype = torch.float32
    """Precision in which the weights are written; they are rounded to it before they are measured at the end."""
    sha256: str | None = None
    """Digest of the network before the training and of its tokenizer; None for one that the recipe and the texts
    decide."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What the record of the training says of it, as JSON."""
    learning_rate: float = FINE_TUNING_RATE
    """Largest learning rate, unless the recipe has one."""


def from_scratch(texts: Texts, config: TrainingConfig) -> StartingPoint:
    """Make a network with the shape that `config` says, and train a byte-level BPE on the texts.

    The initial weights come from torch's random numbers. Raises ModelError if the texts are too short for the BPE.
    """
    shape = config.gpt_config(end_of_text_id=0)
    tokenizer = train_tokenizer(texts.documents, shape.vocab_size)
    end_of_text_id = tokenizer.encode(END_OF_TEXT).ids[0]
    gpt = GPT(config.gpt_config(end_of_text_id=end_of_text_id), residual_scaling=config.residual_scaling)

    def write(folder: Path) -> None:
        save_gpt(gpt, folder, dtype=torch.float16)
        tokenizer.save_model(str(folder))
        write_json(folder, _GPT2_TOKENIZER if shape.norm == POST else {})

    return StartingPoint(
        gpt,
        n_positions=shape.n_positions,
        encode=lambda text: tokenizer.encode(text).ids,
        end_of_text_id=end_of_text_id,
        write=write,
        dtype=torch.float16,
    )


def trainable(gpt: GPT, dropout: float | None = None) -> GPT:
    """Return a copy of a loaded network, whose weights may lie in a mapped file, to train.

    `dropout`, if given, is that on the embeddings and the residual branches, without any on the attention weights.
    Raises ModelError if it is not from 0 to below 1.
    """
    config = gpt.config
    if dropout is not None:
        config = replace(config, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0)
    with torch.device("meta"):
        copy = GPT(config)
    copy.load_state_dict({name: tensor.detach().clone() for name, tensor in gpt.state_dict().items()}, assign=True)
    return copy


def write_json(folder: Path, files: Mapping[str, object]) -> None:
    """Write each value as JSON into a file of its name. Raises OSError."""
    for name, values in files.items():
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
