"""The likeliest last word of a text: which tokens begin, continue and end a word, and which words are stop words.

LAMBADA (Paperno et al. 2016) asks for it. GPT-2's paper (Radford et al. 2019, section 3.3) saw that most of the model's
wrong words go on with the sentence instead of ending it, and filters stop words as an approximation.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ortgpt.decode.path_search import Mask, Path, PathRules, likeliest_path
from ortgpt.errors import PromptError, shown
from ortgpt.model import LoadedModel
from ortgpt.tasks.answer import WORD, is_abbreviation
from ortgpt.text.tokenizer import Tokenizer

MAX_STEPS = 1_000  # of the search: seconds with GPT-2 small on two CPU cores
MAX_TOKENS = 8  # of a word, unless the options say otherwise

_PART = re.compile(r"(?:[^\W_]+['’-])*[^\W_]*")  # what a word may begin with
# The bytes of a token in a word; those of a character beyond ASCII, or a part of one, the whole word decides.
_INSIDE = re.compile(rb"[0-9A-Za-z'\x80-\xff-]+")
_FIRST = re.compile(rb" [0-9A-Za-z'\x80-\xff-]*")


class LastWords:
    """The search of last words with one model and one set of rules."""

    def __init__(self, model: LoadedModel, stop_words: Collection[str], ends: Sequence[str]) -> None:
        """Sort the vocabulary. Raises PromptError for a tokenizer whose tokens have no bytes of their own."""
        if not model.tokenizer.is_byte_level:
            raise PromptError(
                f"a last word needs a tokenizer whose tokens are bytes, as GPT-2's, and {model.bundle.path} has one of "
                "the kind " + model.tokenizer.kind
            )
        self._model = model
        self._stop_words = stop_words
        self._ends_sentence = bool(ends)
        self._token_bytes = dict(_tokens_with_bytes(model.tokenizer))
        marks = tuple(end.encode() for end in ends)
        tokens = self._token_bytes.values()
        idle = [end for end in ends if not any(data.startswith(end.encode()) for data in tokens)]
        if idle:
            path = model.bundle.path
            raise PromptError(f"ends: {shown(idle[0])} begins no token of {path}; name what one begins with")
        self._rules = PathRules(
            begins=self._mask(token_id for token_id, data in self._token_bytes.items() if _FIRST.fullmatch(data)),
            continues=self._mask(token_id for token_id, data in self._token_bytes.items() if _INSIDE.fullmatch(data)),
            ends=self._mask(
                token_id for token_id, data in self._token_bytes.items() if _ends_word(data, marks)
            ) | self._mask(model.bundle.config.eos_token_ids),
            may_continue=self._may_continue,
            may_end=self._may_end,
        )  # fmt: skip

    def find(self, prompt_ids: Sequence[int], max_tokens: int) -> Path | None:
        """Return the likeliest word of at most `max_tokens` tokens after a prompt that does not end in white space."""
        return likeliest_path(
            self._model.engine, prompt_ids, self._rules, max_tokens=max_tokens, max_steps=MAX_STEPS
        )  # fmt: skip

    def _mask(self, token_ids: Iterator[int] | Sequence[int]) -> Mask:
        mask = np.zeros(self._model.engine.allowed_vocab_size, bool)
        mask[[*token_ids]] = True
        return mask

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._token_bytes[token_id] for token_id in token_ids)[1:]  # without the space before it

    def _may_continue(self, token_ids: Sequence[int]) -> bool:
        try:  # a character may still be incomplete
            text = codecs.getincrementaldecoder("utf-8")().decode(self._bytes_of(token_ids))
        except UnicodeDecodeError:
            return False
        return _PART.fullmatch(text) is not None

    def _may_end(self, token_ids: Sequence[int]) -> bool:
        try:
            word = self._bytes_of(token_ids).decode()
        except UnicodeDecodeError:
            return False
        if WORD.fullmatch(word) is None or (self._ends_sentence and is_abbreviation(word)):
            return False
        return word.lower().replace("’", "'") not in self._stop_words


def _tokens_with_bytes(tokenizer: Tokenizer) -> Iterator[tuple[int, bytes]]:
    """Yield the tokens that stand for a text: no added ones, which mark something."""
    others = {*tokenizer.unused_ids(), *tokenizer.added_ids()}
    for token_id in range(tokenizer.vocab_size):
        if token_id not in others:
            yield token_id, tokenizer.token_bytes(token_id)


def _ends_word(data: bytes, marks: tuple[bytes, ...]) -> bool:
    """Tell whether a token that follows a word ends it: it begins with a mark, or, without marks, with no letter."""
    if marks:
        return data.startswith(marks)
    text = data.decode("utf-8", errors="ignore")
    return (
        bool(text) and data.startswith(text[0].encode()) and _PART.fullmatch(text[0]) is None and text[0] not in "'’-"
    )
