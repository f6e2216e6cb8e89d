"""The tokenizer of a bundle that has none: calls take and give token ids, and there is no text."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from ortgpt.contract import TokenizerKind
from ortgpt.errors import PromptError, shown
from ortgpt.text.tokenizer import TextStream, Tokenizer


class IdsOnly(Tokenizer):
    """A vocabulary of ids that stand for no text: decode() gives an empty one, encode() raises PromptError."""

    kind = TokenizerKind.NONE
    is_byte_level = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return self._vocab_size

    def encode(self, text: str, *, special_tokens: bool = False) -> NoReturn:
        """Raise PromptError: there is no text."""
        self._check_text(text)
        raise PromptError("this bundle has no tokenizer, so a text cannot be encoded; give token ids")

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the empty text."""
        for token_id in self._checked_ids(token_ids):
            is_id = isinstance(token_id, numbers.Integral) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self._vocab_size:
                raise self._unknown_id(token_id)
        return ""

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Begin a text that stays empty."""
        return _NoText()

    def size_bytes(self, token_ids: Iterable[int]) -> int:
        """Return 0."""
        return len(self.decode(token_ids))

    def token_bytes(self, token_id: int) -> NoReturn:
        """Raise PromptError: there is no text."""
        raise PromptError("this bundle has no tokenizer, so its tokens have no bytes")

    def unused_ids(self) -> Iterator[int]:
        """Return no ids."""
        return iter(())

    def added_ids(self) -> Iterator[int]:
        """Return no ids."""
        return iter(())

    def is_same(self, other: Tokenizer) -> bool:
        """Tell whether the other has as many ids and no text, too."""
        return isinstance(other, IdsOnly) and other.vocab_size == self.vocab_size


class _NoText(TextStream):
    is_whole = True

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def parse_ids(text: str, vocab_size: int) -> list[int]:
    """Return the ids that a text writes as numbers separated by white space. Raises PromptError."""
    ids = []
    for number in text.split():
        if not (number.isascii() and number.isdigit() and len(number) < 12):
            raise PromptError(
                f"{shown(number)} is no token id (accepted: ids separated by white space, since this bundle has no "
                "tokenizer)"
            )
        ids.append(int(number))
    unknown = [token_id for token_id in ids if token_id >= vocab_size]
    if unknown:
        raise PromptError(f"token id {unknown[0]} is not in the vocabulary (accepted: 0 to {vocab_size - 1})")
    return ids
