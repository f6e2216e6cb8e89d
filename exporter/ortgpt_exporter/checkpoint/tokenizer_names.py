"""Know which names the files of a tokenizer have, and of which kind a tokenizer with other names is. Reads no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ortgpt.contract import File

ADDED_TOKENS = "added_tokens.json"
# GPT-2's two files, with the names that OpenAI gave them after the usual ones.
VOCAB_NAMES = (File.VOCAB, "encoder.json")
MERGES_NAMES = (File.MERGES, "vocab.bpe")

_WHOLE = "a tokenizer in one file; to use it, name the file (--tokenizer {folder}/{name})"
_UNUSABLE = "which cannot be used"
WORDPIECE_VOCAB = "vocab.txt"  # of BERT and many Chinese models
# Patterns of the names that other tokenizers have, and what a message says of them.
_OTHER_KINDS = {
    "*.tiktoken": f"ranks of tiktoken, {_UNUSABLE}",
    "tokenizer.model": f"a SentencePiece model, or one of tiktoken, {_UNUSABLE}",
    "*.model": f"a SentencePiece model, {_UNUSABLE}",
    "tokenizer_config.json": "",
    "*tokenizer*.json": _WHOLE,
    "*vocab.json": f"a vocabulary, to be renamed to {File.VOCAB}",
    "*merges.txt": f"merges, to be renamed to {File.MERGES}",
    "merges.json": f"merges as JSON, to be written to {File.MERGES} as one pair a line with a space between its parts",
    "meta.pkl": "the characters of a nanoGPT model; to use them, name the file (--tokenizer {folder}/{name})",
}
# Those that are fetched from a hub, so that the message about a missing tokenizer can name them.
OTHER_NAMES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "aitextgen.tokenizer.json")


def describe_others(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield what each file of a tokenizer of another kind is, for the message that `folder` has no tokenizer."""
    for name in sorted(names):
        kind = next((kind for pattern, kind in _OTHER_KINDS.items() if fnmatchcase(name, pattern)), "")
        if kind and name not in (*VOCAB_NAMES, *MERGES_NAMES, File.TOKENIZER):
            yield f"{name} is {kind.format(folder=folder, name=name)}"
