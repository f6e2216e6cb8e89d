"""A small stand-in for every dialect of checkpoint, each with an oracle. `make check-dialects` exports each by make.

`python checks/dialects.py FOLDER`, with tests/ on PYTHONPATH, writes them and prints for each the variables of
`make export`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, GPT2Tokenizer

from models.test_nanogpt import NanoGPT, make, write
from ortgpt_exporter import CheckpointSource
from support import greedy_ids, write_checkpoint, write_small_tokenizer

Greedy = Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class Standin:
    """A checkpoint on disk, and what it must generate."""

    source: CheckpointSource
    greedy: Greedy
    """Maps the ids of a prompt and a count to that many new ids, by the dialect's own framework."""


def by_transformers(folder: Path, **options: Any) -> Standin:
    """Return a stand-in whose oracle is generate() of `transformers` on the same folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Standin(CheckpointSource(folder), lambda ids, new: greedy_ids(model, ids, new, **options))


def reshaped(**config: Any) -> Callable[[Path], Standin]:
    return lambda folder: by_transformers(write_checkpoint(folder, seed=3, **config))


def padded_vocabulary(folder: Path) -> Standin:
    """Write a network with four rows more than the tokenizer has tokens, which `transformers` must suppress."""
    return by_transformers(write_checkpoint(folder, seed=3, vocab_size=304), suppress_tokens=[300, 301, 302, 303])


def restored(change: Callable[[Tensor], Tensor]) -> Callable[[Path], Standin]:
    """Return a writer of a checkpoint whose stored tensors are changed."""

    def writer(folder: Path) -> Standin:
        path = write_checkpoint(folder, seed=3) / "model.safetensors"
        tensors = {key: change(tensor).contiguous() for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        return by_transformers(folder)

    return writer


def sharded(folder: Path) -> Standin:
    write_checkpoint(folder, seed=3)
    model = GPT2LMHeadModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return by_transformers(folder)


def pickled(*, shards: bool = False, dialogpt: bool = False) -> Callable[[Path], Standin]:
    """Return a writer of pytorch_model.bin: whole, in shards, or like DialoGPT's: float16, with masks and a head."""

    def writer(folder: Path) -> Standin:
        path = write_checkpoint(folder, seed=3) / "model.safetensors"
        state: dict[str, Tensor] = load_file(path)
        if dialogpt:
            state = {key: tensor.half() for key, tensor in state.items()}
            masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 64, 64).byte().tril() for i in (0, 1)}
            state |= masks | {"lm_head.weight": state["transformer.wte.weight"]}
        oracle = _of_state(folder, state) if dialogpt else by_transformers(folder)
        path.unlink()
        if not shards:
            torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not dialogpt)
            return oracle
        names = [f"pytorch_model-0000{part}-of-00003.bin" for part in (1, 2, 3)]
        weight_map = {key: names[index % 3] for index, key in enumerate(state)}
        for name in names:
            torch.save({key: state[key] for key in state if weight_map[key] == name}, folder / name)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return oracle

    return writer


def _of_state(folder: Path, state: dict[str, Tensor]) -> Standin:
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    model.load_state_dict({key: tensor.float() for key, tensor in state.items() if not key.endswith(".attn.bias")})
    return Standin(CheckpointSource(folder), lambda ids, new: greedy_ids(model, ids, new))


def nanogpt(**args: Any) -> Callable[[Path], Standin]:
    """Return a writer of a ckpt.pt after torch.compile, with a padded vocabulary, and of a tokenizer folder."""

    def writer(folder: Path) -> Standin:
        (folder / "tokenizer").mkdir(parents=True)
        write_small_tokenizer(folder / "tokenizer")
        model = make(vocab_size=320, block_size=64, **args)
        state = {f"_orig_mod.{key}": tensor for key, tensor in model.state_dict().items()}
        path = write(folder / "ckpt.pt", state, vocab_size=320, block_size=64, **args)
        source = CheckpointSource(path, tokenizer=folder / "tokenizer")
        return Standin(source, lambda ids, new: _nano_greedy(model, ids, new))

    return writer


@torch.no_grad()
def _nano_greedy(model: NanoGPT, ids: list[int], new: int) -> list[int]:
    ids = list(ids)
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids]))[0, -1, :300].argmax()))  # rows from 300 on are padding
    return ids[-new:]


def adapter(**settings: Any) -> Callable[[Path], Standin]:
    """Return a writer of a checkpoint and a LoRA adapter for it."""

    def writer(folder: Path) -> Standin:
        write_checkpoint(folder / "base", seed=3)
        torch.manual_seed(5)
        base: Any = GPT2LMHeadModel.from_pretrained(folder / "base")
        lora: Any = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"], **settings)
        adapted = get_peft_model(base, lora)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.3)
        adapted.save_pretrained(str(folder / "adapter"))
        loaded: Any = GPT2LMHeadModel.from_pretrained(folder / "base").eval()
        model: Any = PeftModel.from_pretrained(loaded, str(folder / "adapter")).eval()
        source = CheckpointSource(folder / "base", adapter=folder / "adapter")
        return Standin(source, lambda ids, new: greedy_ids(model, ids, new))

    return writer


def one_tokenizer_file(folder: Path) -> Standin:
    write_checkpoint(folder, seed=3, vocab_size=301)
    tokenizer = GPT2Tokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|more|>"])
    tokenizer.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)
    return by_transformers(folder)


DIALECTS: dict[str, Callable[[Path], Standin]] = {
    "safetensors": reshaped(),
    "safetensors-sharded": sharded,
    "float16": restored(Tensor.half),
    "bfloat16": restored(Tensor.bfloat16),
    "bin": pickled(),
    "bin-sharded": pickled(shards=True),
    "dialogpt": pickled(dialogpt=True),
    "distilgpt2": reshaped(n_layer=6, summary_type="cls_index", summary_use_proj=True),
    "gpt1": reshaped(family="openai-gpt"),
    "gpt1-untied": reshaped(family="openai-gpt", tie_word_embeddings=False, afn="relu"),
    "n-inner": reshaped(n_inner=77),
    "inverse-layer": reshaped(scale_attn_by_inverse_layer_idx=True, n_layer=3),
    "padded-vocabulary": padded_vocabulary,
    "tokenizer-json": one_tokenizer_file,
    "nanogpt": nanogpt(),
    "nanogpt-no-bias": nanogpt(bias=False),
    "lora": adapter(fan_in_fan_out=True),
    "dora": adapter(fan_in_fan_out=True, use_dora=True),
}


if __name__ == "__main__":
    for name, writer in DIALECTS.items():
        source = writer(Path(sys.argv[1]) / name).source
        variables = {
            "CHECKPOINT": source.name,
            "OUT": Path(sys.argv[1]) / f"{name}-bundle",
            "TOKENIZER": source.tokenizer,
            "ADAPTER": source.adapter,
        }
        print(shlex.join(f"{key}={value}" for key, value in variables.items() if value))
