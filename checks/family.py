"""Run the commands of the family's page as a newcomer would, on stand-ins of the published checkpoints.

`make check-family` serves repositories with the names, shapes and kinds of tokenizer of published ones, and random
weights, from a stand-in for the Hugging Face hub on this machine. Then it runs the commands of docs/family.md in an
empty folder, and prints each with what it wrote.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    BertTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
)

from exporter.checkpoint.hub_server import Repo, serve_hub
from models.test_nanogpt import make as make_nanogpt
from models.test_nanogpt import write as write_nanogpt
from ortgpt_models.presets import PRESETS
from support import TEXT, write_real_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "family.md"
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REPO = re.compile(r"\b([\w-]+/[\w.-]+)(?= -o)")


def gpt2(preset: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save(GPT2LMHeadModel, GPT2Config(**shape(preset)), folder)
        write_real_tokenizer(folder)

    return write


def gpt1(folder: Path) -> None:
    """Write a network of GPT-1's shape, with a BPE of its kind; entries that no text uses fill the vocabulary."""
    config = OpenAIGPTConfig()
    save(OpenAIGPTLMHeadModel, config, folder)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    vocab = tokenizer.get_vocab()
    vocab |= {f"unused{token_id}</w>": token_id for token_id in range(len(vocab), config.vocab_size)}
    merges = [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokenizer.model = models.BPE(vocab, merges, unk_token="<unk>", end_of_word_suffix="</w>")
    tokenizer.save(str(folder / "tokenizer.json"))


def chinese(folder: Path) -> None:
    """Write a network with a WordPiece vocabulary in vocab.txt, one token a character, as many Chinese GPT-2s have."""
    letters = [chr(code) for code in range(0x4E00, 0x4E00 + 5000)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"，。！？", *letters]
    save(GPT2LMHeadModel, GPT2Config(vocab_size=len(vocab), n_layer=6, bos_token_id=2, eos_token_id=3), folder)
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")


def italian(folder: Path) -> None:
    """Write a network whose tokenizer.json normalises text and splits off digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    size = tokenizer.get_vocab_size()
    save(GPT2LMHeadModel, GPT2Config(vocab_size=size, n_layer=6, bos_token_id=None, eos_token_id=None), folder)


def music(folder: Path) -> None:
    """Write a network on ids that stand for no text."""
    save(GPT2LMHeadModel, GPT2Config(vocab_size=512, n_layer=6, bos_token_id=0, eos_token_id=1), folder)


def classifier(kind: Any, *labels: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        names = dict(enumerate(labels))
        config = GPT2Config(
            **shape("gpt2"), id2label=names, label2id={name: index for index, name in names.items()}, pad_token_id=50256
        )
        save(kind, config, folder)
        write_real_tokenizer(folder)

    return write


REPOS: Mapping[str, Callable[[Path], None]] = {
    "openai-community/openai-gpt": gpt1,
    **{f"openai-community/{name}": gpt2(name) for name in PRESETS if name.startswith("gpt2")},
    "your-name/spam-filter": classifier(GPT2ForSequenceClassification, "mail", "spam"),
    "your-name/name-finder": classifier(GPT2ForTokenClassification, "other", "name"),
    "your-name/chinese-gpt2": chinese,
    "your-name/italian-gpt2": italian,
    "your-name/music-gpt2": music,
}


def shape(preset: str) -> dict[str, int]:
    values = PRESETS[preset]
    return {name: getattr(values, name) for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}


def save(kind: Any, config: Any, folder: Path) -> None:
    """Write random weights, in float16 as many checkpoints are."""
    torch.manual_seed(0)
    kind(config).half().save_pretrained(folder)


def stand_in(name: str) -> Repo:
    """Make a repository whose files are mapped: an export of the largest leaves no room for a copy in memory."""
    with tempfile.TemporaryDirectory() as folder:
        REPOS[name](Path(folder))
        return Repo({path.name: mapped(path) for path in Path(folder).iterdir()})


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file that is not empty; they stay after the file is removed."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_inputs(folder: Path) -> None:
    """Write the files that the commands read: a text, and a nanoGPT checkpoint of characters with its meta.pkl."""
    pages = sorted(PAGE.parent.glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    notes = text.replace("<|endoftext|>", "end-of-text")  # which would end a document
    (folder / "notes.txt").write_text(notes, encoding="utf-8", newline="\n")
    letters = sorted(set(TEXT))
    (folder / "nanogpt").mkdir()
    state = make_nanogpt(vocab_size=len(letters)).state_dict()
    write_nanogpt(folder / "nanogpt" / "ckpt.pt", state, vocab_size=len(letters))
    stoi = {letter: place for place, letter in enumerate(letters)}
    meta = {"vocab_size": len(letters), "itos": {place: letter for letter, place in stoi.items()}, "stoi": stoi}
    (folder / "nanogpt" / "meta.pkl").write_bytes(pickle.dumps(meta))


def main() -> None:
    commands = "".join(_COMMANDS.findall(PAGE.read_text(encoding="utf-8"))).splitlines()
    with serve_hub() as hub, tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": f"{folder}/hub",
            "NO_PROXY": "127.0.0.1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        write_inputs(Path(folder))
        for command in commands:
            print(f"$ {command}", flush=True)
            repo = _REPO.search(command)
            if repo is not None and repo[1] in REPOS:
                hub.repos = {repo[1]: stand_in(repo[1])}
            if subprocess.run(["bash", "-c", command], cwd=folder, env=environment, check=False).returncode:
                sys.exit(f"failed: {command}")


if __name__ == "__main__":
    main()
