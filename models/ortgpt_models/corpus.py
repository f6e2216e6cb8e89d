"""The texts of a training: read, split into what is trained on and what is held out, and encoded. Knows no network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

from ortgpt_models.errors import ModelError
from ortgpt_models.files import read_text

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Texts:
    """The texts of a training."""

    documents: tuple[str, ...]
    """Those to train on."""
    held_out: str
    """The one to measure on."""

    @property
    def sha256(self) -> str:
        """Digest of all of them: a training resumes only with the same ones."""
        return hashlib.sha256(json.dumps([self.documents, self.held_out]).encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """The texts of a training as token ids."""

    train_ids: Tensor
    """Token ids to train on, int64 (tokens,); end-of-text after each document, if there is one."""
    held_out_ids: Tensor
    """Token ids to measure on, int64 (tokens,), of which the first is only read; it is end-of-text, if there is one."""
    held_out_bytes: int
    """Size of the held-out text in UTF-8 bytes."""


def read_texts(paths: Sequence[Path], held_out: Path | None) -> Texts:
    """Read UTF-8 text files; without `held_out`, the last 5% of the text is held out.

    Raises ModelError for a text that is empty, not UTF-8, or holds end-of-text.
    """
    documents = [_read_text(path) for path in paths]
    if held_out is not None:
        return Texts(tuple(documents), _read_text(held_out))
    return Texts(*_cut_off_end(documents))


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> ByteLevelBPETokenizer:
    """Train a byte-level BPE with end-of-text as its first token. Raises ModelError if the texts are too short."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        iter(documents), vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ModelError(
            f"the text yields a vocabulary of only {tokenizer.get_vocab_size()} tokens, not {vocab_size}; "
            "use more text or a smaller vocab_size"
        )
    return tokenizer


def encode_corpus(
    texts: Texts, encode: Callable[[str], Sequence[int]], end_of_text_id: int | None, window: int
) -> Corpus:
    """Encode the texts. Raises ModelError if they are too short for a window, or to measure on."""
    end = [] if end_of_text_id is None else [end_of_text_id]
    train_ids = [token_id for text in texts.documents for token_id in [*encode(text), *end]]
    held_out_ids = [*end, *encode(texts.held_out)]
    if len(train_ids) <= window or len(held_out_ids) < 2:
        raise ModelError(
            f"{len(train_ids)} tokens to train on and {len(held_out_ids) - len(end)} held out are too few "
            f"(accepted: more than the window of {window}, and {2 - len(end)} or more)"
        )
    return Corpus(torch.tensor(train_ids), torch.tensor(held_out_ids), len(texts.held_out.encode()))


def _cut_off_end(documents: list[str]) -> tuple[tuple[str, ...], str]:
    """Split the texts, in their order, into those to train on and the last share of their characters."""
    room = int(sum(map(len, documents)) * (1 - HELD_OUT_SHARE))
    kept, rest = [], []
    for document in documents:
        kept.append(document[:room])
        rest.append(document[room:])
        room = max(0, room - len(document))
    return tuple(text for text in kept if text), "".join(rest)


def _read_text(path: Path) -> str:
    text = read_text(Path(path))
    if not text.strip():
        raise ModelError(f"{path} holds no text")
    if END_OF_TEXT in text:
        raise ModelError(f"{path} holds the text {END_OF_TEXT}, which marks the end of a document; remove it")
    return text
