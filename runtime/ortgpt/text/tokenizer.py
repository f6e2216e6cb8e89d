"""What the rest needs of a tokenizer, whatever its kind: text to ids, and growing ids to text.

Knows no file and no model; `open_tokenizer.py` chooses the class that the bundle's files need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from ortgpt.errors import PromptError


class TextStream(ABC):
    """The text of a growing sequence of ids: whole characters, incomplete ones held until they are complete."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether nothing is held: every id has given its text."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text of what is held, U+FFFD for a character that is still incomplete."""


class Tokenizer(ABC):
    """Turn text into ids and ids into text. Safe to use from several threads."""

    kind: ClassVar[str]
    """The kind of its files, one of contract.TokenizerKind."""
    is_byte_level: bool
    """Whether the text of ids is that of their bytes joined, which a grammar needs."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id that has a token, plus one."""

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; the names of special tokens in it are plain text unless `special_tokens` is set.

        Raises PromptError for anything but a text.
        """

    def encode_surrounded(self, text: str) -> list[int]:
        """Return the ids of `text` with the special tokens that a tokenizer.json puts around every text, if it does.

        Classifiers are trained on these. Raises PromptError as encode() does.
        """
        return self.encode(text)

    @abstractmethod
    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`; bytes that are not UTF-8 become U+FFFD. Raises PromptError."""

    @abstractmethod
    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Begin the text of ids that follow `after`; without it the pieces joined are the text of decode()."""

    @abstractmethod
    def size_bytes(self, token_ids: Iterable[int]) -> int:
        """Return how many bytes the text of `token_ids` has; bytes that are not UTF-8 count as they are."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token. Raises PromptError for an unknown id, and if not `is_byte_level`."""

    @abstractmethod
    def unused_ids(self) -> Iterator[int]:
        """Return the ids below vocab_size that have no token, in order."""

    @abstractmethod
    def added_ids(self) -> Iterator[int]:
        """Return the ids of added tokens, special ones among them."""

    @abstractmethod
    def is_same(self, other: Tokenizer) -> bool:
        """Tell whether another tokenizer gives the same ids to every text."""

    def _check_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise PromptError(f"text is a {type(text).__name__} (accepted: str)")

    def _checked_ids(self, token_ids: Iterable[int]) -> Iterable[int]:
        if not isinstance(token_ids, Iterable):
            raise PromptError(f"token_ids = {token_ids!r} (accepted: a sequence of token ids)")
        return token_ids

    def _unknown_id(self, token_id: object) -> PromptError:
        return PromptError(f"token id {token_id!r} is not in the vocabulary (accepted: 0 to {self.vocab_size - 1})")


def without_halves(text: str) -> str:
    """Return a text as it is encoded: two half characters (surrogates) that make one joined, another one as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
