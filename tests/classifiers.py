"""Small random classifiers made for the tests, and what `transformers` computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    OpenAIGPTConfig,
    OpenAIGPTForSequenceClassification,
)

from support import SMALL_VOCAB, name_gpt2_tokenizer, write_small_tokenizer


@dataclass(frozen=True)
class Exported:
    """A classifier of `transformers`, its checkpoint and the bundle that was exported from that."""

    model: Any
    checkpoint: Path
    bundle: Path


CLASSES = {
    "text": (GPT2Config, GPT2ForSequenceClassification),
    "gpt1": (OpenAIGPTConfig, OpenAIGPTForSequenceClassification),
    "token": (GPT2Config, GPT2ForTokenClassification),
}


def write_classifier(folder: Path, kind: str = "text", *, seed: int = 0, **config: Any) -> Any:
    """Write a random two-layer classifier with the small tokenizer; return it, in evaluation mode."""
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[kind]
    shape: dict[str, Any] = {
        "vocab_size": SMALL_VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4,
    }  # fmt: skip
    if "id2label" not in config:
        shape["num_labels"] = 3
    if kind != "gpt1":
        shape |= {"bos_token_id": 0, "eos_token_id": 0}
    model = model_class(config_class(**(shape | config))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1 if parameter.dim() == 1 else parameter.shape[0] ** -0.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_small_tokenizer(folder)
    if kind == "gpt1":
        name_gpt2_tokenizer(folder)
    return model


DELIMITER, EXTRACT = "<|delimiter|>", "<|extract|>"


def write_pair_classifier(folder: Path, task: str | None, kind: str = "text", **config: Any) -> Any:
    """Write a classifier whose tokenizer.json puts tokens around a text, and around and between those of a pair."""
    model = write_classifier(folder, kind, vocab_size=SMALL_VOCAB + 2, pad_token_id=0, **config)
    native = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    native.add_special_tokens([DELIMITER, EXTRACT])
    start = "<|endoftext|>"
    native.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {EXTRACT}",
        pair=f"{start} $A {DELIMITER} $B {EXTRACT}",
        special_tokens=[(start, 0), (DELIMITER, SMALL_VOCAB), (EXTRACT, SMALL_VOCAB + 1)],
    )
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    native.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": start}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if task is not None:
        values = json.loads((folder / "config.json").read_text()) | {"finetuning_task": task}
        (folder / "config.json").write_text(json.dumps(values))
    return model


@torch.no_grad()
def pair_oracle(model: Any, folder: Path, pairs: Sequence[tuple[str, str]]) -> npt.NDArray[np.float32]:
    """Return what `transformers` computes of pairs in one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    inputs = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, return_tensors="pt")
    outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    logits: npt.NDArray[np.float32] = outputs.logits.numpy()
    return logits


@torch.no_grad()
def oracle(model: Any, rows: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
    """Return the logits of each row alone: (labels,), or (tokens, labels)."""
    return [model(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in rows]
