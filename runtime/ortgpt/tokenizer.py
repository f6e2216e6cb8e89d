"""Byte-level BPE from vocab.json and merges.txt, by tiktoken; and bytes back to text without cutting a character.

tiktoken joins the pair whose joined bytes have the lowest rank, so the rank is the line order of merges.txt; a table
turns ranks into the vocabulary's ids where the two differ. Knows no model.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

import tiktoken

from ortgpt.contract import File
from ortgpt.errors import BundleError, PromptError
from ortgpt.strict_json import read_json_object

# The split of GPT-2 (Radford et al. 2019) into contractions, words, numbers, other signs and white space.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    """Turn text into ids and ids into text."""

    def __init__(
        self, encoding: tiktoken.Encoding, id_of_rank: list[int] | None, bytes_of_id: dict[int, bytes]
    ) -> None:
        self._encoding = encoding
        self._id_of_rank = id_of_rank
        self._bytes_of_id = bytes_of_id

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a bundle or checkpoint folder. Raises BundleError naming what does not fit."""
        vocab = read_vocab(folder / File.VOCAB)
        merges = read_merges(folder / File.MERGES)
        byte_of = _byte_of_letter()
        ranked = list(byte_of) + ["".join(pair) for pair in merges]
        faults = [f"byte {byte_of[letter]} is missing" for letter in byte_of if letter not in vocab]
        faults += [f"merge {text!r} is missing" for text in ranked[len(byte_of) :] if text not in vocab]
        if len(set(vocab.values())) != len(vocab):
            faults.append("two tokens share an id")
        if faults:
            shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
            raise BundleError(f"{folder / File.VOCAB} and {File.MERGES} do not make a byte-level BPE: {shown}")
        table = _translation(byte_of)
        try:
            tokens = [text.translate(table).encode("latin-1") for text in ranked]
        except UnicodeEncodeError as error:
            raise BundleError(
                f"{folder / File.MERGES} joins to {error.object!r}, which has a letter for no byte"
            ) from None
        id_of_rank = [vocab[text] for text in ranked]
        ranks: dict[bytes, int] = {}
        for rank, token in enumerate(tokens):
            ranks.setdefault(token, rank)
        bytes_of_id = dict(zip(id_of_rank, tokens, strict=True))
        # What no merge makes is an added token: kept, and found in a text only on request.
        added = sorted((token_id, text) for text, token_id in vocab.items() if token_id not in bytes_of_id)
        bytes_of_id |= {token_id: text.encode() for token_id, text in added}
        special = {text: len(id_of_rank) + index for index, (_, text) in enumerate(added)}
        id_of_rank += [token_id for token_id, _ in added]
        encoding = tiktoken.Encoding(folder.name, pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens=special)
        same = id_of_rank == list(range(len(id_of_rank)))
        return cls(encoding, None if same else id_of_rank, bytes_of_id)

    @property
    def vocab_size(self) -> int:
        """The number of ids, from 0 to the largest that stands for something."""
        return max(self._bytes_of_id) + 1

    def unused_ids(self) -> list[int]:
        """Return the ids below vocab_size that stand for nothing."""
        return [token_id for token_id in range(self.vocab_size) if token_id not in self._bytes_of_id]

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; the names of special tokens in it are plain text unless `special_tokens` is set."""
        if not isinstance(text, str):
            raise PromptError(f"text is a {type(text).__name__} (accepted: str)")
        if special_tokens:
            ranks = self._encoding.encode(text, allowed_special="all")
        else:
            ranks = self._encoding.encode_ordinary(text)
        return ranks if self._id_of_rank is None else [self._id_of_rank[rank] for rank in ranks]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        if not isinstance(token_ids, Iterable):
            raise PromptError(f"token_ids = {token_ids!r} (accepted: a sequence of token ids)")
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one id stands for. Raises PromptError for an id that stands for nothing."""
        try:
            return self._bytes_of_id[token_id]
        except (KeyError, TypeError):
            raise PromptError(
                f"token id {token_id!r} is not in the vocabulary (accepted: 0 to {self.vocab_size - 1})"
            ) from None


class TextStream:
    """Text of a growing sequence of ids: whole characters only, the rest held until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return U+FFFD for a character left incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Find stop strings in a text that arrives in pieces; hold back what may be the beginning of one.

    The stop string that is complete first ends the text, wherever the pieces were cut; of two that end together, the
    longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop string that ended it or None."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return text[: end - len(stop)], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def read_vocab(path: Path) -> dict[str, int]:
    """Read a vocab.json: token (in the letters of GPT-2) to id. Raises BundleError."""
    vocab = read_json_object(path)
    if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in vocab.values()):
        raise BundleError(f"{path} maps a token to something that is no id (accepted: integers of 0 or more)")
    return vocab


def read_merges(path: Path) -> list[tuple[str, str]]:
    """Read a merges.txt: one pair a line in order of rank; a first line that begins with #version is a comment."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not readable: {error}") from None
    start = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[start:], start + 1):
        pair = line.rstrip("\r").split(" ")
        if pair == [""]:
            continue
        if len(pair) != 2 or not all(pair):
            raise BundleError(f"{path} line {number} is {line!r}; expected two tokens with one space between them")
        merges.append((pair[0], pair[1]))
    return merges


def _byte_of_letter() -> dict[str, int]:
    """Return GPT-2's letter for each byte: printable Latin-1 stands for itself, the rest follow from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + index): byte for index, byte in enumerate(rest)}


def _translation(byte_of: dict[str, int]) -> dict[int, int]:
    """Return the table that turns GPT-2's letters into Latin-1, and what is none of them into what Latin-1 lacks."""
    foreign = {byte: 0xFFFF for byte in range(256) if chr(byte) not in byte_of}
    return foreign | {ord(letter): byte for letter, byte in byte_of.items()}


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
