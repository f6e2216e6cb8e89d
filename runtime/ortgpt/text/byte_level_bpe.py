"""Byte-level BPE from vocab.json and merges.txt, by tiktoken; and bytes back to text without cutting a character.

tiktoken joins the pair whose joined bytes have the lowest rank, so the rank is the line order of merges.txt; a table
turns ranks into the vocabulary's ids where the two differ. Knows no model.
"""

from __future__ import annotations

import array
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from ortgpt.bundle.files import read_text
from ortgpt.contract import File, TokenizerKind
from ortgpt.errors import BundleError, listed, shown
from ortgpt.native_call import native_call
from ortgpt.text.bpe_files import byte_of_letter, joined_merges, read_vocab
from ortgpt.text.detokenizer import ByteStream
from ortgpt.text.tokenizer import TextStream, Tokenizer

# GPT-2 (Radford et al. 2019) splits a text into contractions, words, numbers, other signs and white space.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# White space as Unicode and that split mean it (Python's own \s has four separators more).
_SPACE = "\\t-\\r \\x85\\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
# tiktoken keeps a state for each character of a run of white space until the run ends, and panics at a million.
_LONG = 10_000
_LONG_SPACE = re.compile(f"(?<![{_SPACE}])[{_SPACE}]{{{_LONG},}}")


class ByteLevelBPE(Tokenizer):
    """The tokenizer of GPT-2, with any vocabulary and merges."""

    kind = TokenizerKind.BYTE_LEVEL_BPE
    is_byte_level = True

    def __init__(self, tokens: list[bytes], id_of_rank: Sequence[int] | None, added: Mapping[str, int]) -> None:
        """Take the bytes of each rank, its ids unless they equal the ranks, and the ids of added tokens."""
        self._tokens = tokens
        # Of tokens with the same bytes the first counts, but dict() keeps the last.
        self._ranks = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
        self._id_of_rank = id_of_rank
        self._rank_of_id = None if id_of_rank is None else {each: rank for rank, each in enumerate(id_of_rank)}
        self._added = added
        self._added_bytes = {token_id: text.encode() for text, token_id in added.items()}
        self._encoding = tiktoken.Encoding("gpt2", pat_str=_SPLIT, mergeable_ranks=self._ranks, special_tokens={})
        self._space: tiktoken.Encoding | None = None
        lengths: dict[str, set[int]] = {}
        for text in added:
            lengths.setdefault(text[0], set()).add(len(text))
        self._added_lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._added_first = re.compile(f"[{re.escape(''.join(lengths))}]") if added else None

    @classmethod
    def load(cls, folder: Path) -> ByteLevelBPE:
        """Read the tokenizer of a bundle or checkpoint folder. Raises BundleError that names what does not fit."""
        path = folder / File.MERGES
        joined = joined_merges(read_text(path), source=str(path))
        source = f"{folder / File.VOCAB} and {File.MERGES}"
        # The vocabulary is read last, so that its memory can be freed as a whole.
        tokens, faults = _bytes_of(joined)
        return cls(tokens, *_ids_of(joined, read_vocab(folder / File.VOCAB), faults, source))

    @classmethod
    def from_vocab(cls, vocab: Mapping[str, int], joined: Sequence[str], *, source: str) -> ByteLevelBPE:
        """Build a tokenizer from a mapping of tokens to ids and the tokens that merges make, in order of rank.

        A token that no merge makes is an added token: encode() finds it in a text only on request. Raises BundleError,
        which begins with `source` and names what does not fit.
        """
        tokens, faults = _bytes_of(joined)
        return cls(tokens, *_ids_of(joined, vocab, faults, source))

    @property
    def vocab_size(self) -> int:
        """The largest id that has a token, plus one."""
        ranked = len(self._tokens) - 1 if self._rank_of_id is None else max(self._rank_of_id)
        return max(ranked, *self._added_bytes) + 1 if self._added_bytes else ranked + 1

    def added_ids(self) -> Iterator[int]:
        """Return the ids of added tokens, which no merge makes."""
        return iter(self._added_bytes)

    def is_same(self, other: Tokenizer) -> bool:
        """Tell whether another tokenizer gives the same ids to every text."""
        if not isinstance(other, ByteLevelBPE):
            return False
        mine, theirs = ((each._tokens, list(each._id_of_rank or ()), each._added_bytes) for each in (self, other))
        return mine == theirs

    def unused_ids(self) -> Iterator[int]:
        """Return the ids below vocab_size that have no token, in order."""
        ranked = range(len(self._tokens)) if self._rank_of_id is None else self._rank_of_id
        return (each for each in range(self.vocab_size) if each not in ranked and each not in self._added_bytes)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; the names of special tokens in it are plain text unless `special_tokens` is set.

        Of two special tokens that begin at the same place the longer one is taken, as `transformers` does.
        """
        self._check_text(text)
        ids: list[int] = []
        begin = 0
        for start, end in self._find_added(text) if special_tokens else ():
            ids += self._plain_ids(text[begin:start])
            ids.append(self._added[text[start:end]])
            begin = end
        return ids + self._plain_ids(text[begin:])

    def _plain_ids(self, text: str) -> list[int]:
        with native_call:
            ranks = self._ranks_of(text)
        return ranks if self._id_of_rank is None else [self._id_of_rank[rank] for rank in ranks]

    def _ranks_of(self, text: str) -> list[int]:
        ranks: list[int] = []
        begin = 0
        for run in _LONG_SPACE.finditer(text) if len(text) >= _LONG else ():
            # At the end of a text the split takes a run whole; elsewhere the last character joins what follows.
            end = run.end() - (run.end() < len(text))
            ranks += self._encoding.encode_ordinary(text[begin : run.start()])
            ranks += self._space_encoding().encode_ordinary(text[run.start() : end])
            begin = end
        return ranks + self._encoding.encode_ordinary(text[begin:])

    def _space_encoding(self) -> tiktoken.Encoding:
        """Return an encoding with the same merges and a split without look-ahead, which takes a run of any length."""
        if self._space is None:
            self._space = tiktoken.Encoding("space", pat_str=r"\s+", mergeable_ranks=self._ranks, special_tokens={})
        return self._space

    def _find_added(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield begin and end of the added tokens in `text`: from the left, the longest that begins at a place."""
        begin = 0
        for found in self._added_first.finditer(text) if self._added_first else ():
            start = found.start()
            if start < begin:
                continue
            for length in self._added_lengths[found[0]]:
                if text[start : start + length] in self._added:
                    begin = start + length
                    yield start, begin
                    break

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, self._checked_ids(token_ids))).decode("utf-8", errors="replace")

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Begin the text of growing ids; what went before does not change it."""
        return ByteStream(self.token_bytes)

    def size_bytes(self, token_ids: Iterable[int]) -> int:
        """Return the size in bytes of the text of `token_ids`."""
        return sum(len(self.token_bytes(token_id)) for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id. Raises PromptError for an id that has no token."""
        try:
            if token_id in self._added_bytes:
                return self._added_bytes[token_id]
            rank = token_id if self._rank_of_id is None else self._rank_of_id[token_id]
            if rank < 0:
                raise IndexError
            return self._tokens[rank]
        except (LookupError, TypeError):
            raise self._unknown_id(token_id) from None


def _bytes_of(joined: Sequence[str]) -> tuple[list[bytes], list[str]]:
    """Return the bytes of each rank, single bytes first and then those of merges; and the faults, if any."""
    byte_of = byte_of_letter()
    byte_of_unit = np.full(2**16, -1, np.int16)  # of UTF-16; the letters have one each
    byte_of_unit[[*map(ord, byte_of)]] = [*byte_of.values()]
    texts = [*byte_of, *joined]
    units = np.frombuffer("".join(texts).encode("utf-16", "surrogatepass"), np.uint16)[1:]  # after the byte-order mark
    found = byte_of_unit[units]
    if found.min() < 0:
        foreign = next(text for text in joined if not byte_of.keys() >= {*text})
        return [], [f"a merge joins to {shown(foreign)}, which has a letter that means no byte"]
    data = found.astype(np.uint8).tobytes()
    ends = itertools.accumulate(map(len, texts), initial=0)
    return [data[begin:end] for begin, end in itertools.pairwise(ends)], []


def _ids_of(
    joined: Sequence[str], vocab: Mapping[str, int], faults: list[str], source: str
) -> tuple[Sequence[int] | None, dict[str, int]]:
    """Return the id of each rank, None if ids equal ranks, and the ids of added tokens. Raises BundleError."""
    byte_of = byte_of_letter()
    id_of_rank = [*map(vocab.get, itertools.chain(byte_of, joined), itertools.repeat(-1))]
    found = []
    if min(id_of_rank) < 0:
        found += [f"byte {byte_of[letter]} is missing" for letter in byte_of if letter not in vocab]
        found += [f"merge {shown(text)} is missing" for text in sorted(set(joined) - vocab.keys())]
    ids = set(vocab.values())
    if len(ids) != len(vocab):
        found.append("two tokens share an id")
    if "" in vocab:
        found.append("the token '' is empty")
    found += faults
    if found:
        raise BundleError(f"{source} do not make a byte-level BPE: {listed(found)}")
    ids.difference_update(id_of_rank)
    added = {text: token_id for text, token_id in vocab.items() if token_id in ids} if ids else {}
    same = id_of_rank == [*range(len(id_of_rank))]
    return None if same else array.array("l", id_of_rank), added
