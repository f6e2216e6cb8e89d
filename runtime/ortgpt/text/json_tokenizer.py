"""A tokenizer.json of any kind, run by the package `tokenizers`. Needs the extra [tokenizers]; knows no model.

Text is encoded without the post-processor, so no special token is put around it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ortgpt.bundle.files import read_text
from ortgpt.contract import TokenizerKind
from ortgpt.errors import BundleError, OrtGptError, PromptError, shown
from ortgpt.native_call import native_call
from ortgpt.text.bpe_files import byte_of_letter
from ortgpt.text.decoders import are_bytes, byte_run_ids, depends_on_neighbours_only
from ortgpt.text.detokenizer import ByteStream, DeferredStream, TokenStream
from ortgpt.text.tokenizer import TextStream, Tokenizer, without_halves

_Result = TypeVar("_Result")


class JsonTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes."""

    kind = TokenizerKind.TOKENIZER_JSON

    def __init__(self, text: str, *, source: str) -> None:
        """Read the text of a tokenizer.json. Raises BundleError, which begins with `source`."""
        self._text = text
        # Whether special tokens in a text count is state of the object, so there are two; the second is made when it
        # is first wanted. If two threads make it at once, either serves.
        self._plain = _build(text, source)
        self._marked: Any = None
        with native_call:
            self._plain.encode_special_tokens = True
            vocab, added = self._plain.get_vocab(with_added_tokens=True), self._plain.get_added_tokens_decoder()
        tokens = {token_id: token for token, token_id in vocab.items()}
        if not tokens:
            raise BundleError(f"{source} has no token")
        self._tokens = tokens
        self._added = frozenset(added)
        values = json.loads(text)
        model = values["model"]
        unknown = (model.get("unk_token"), model.get("unk_id"))
        special = {token_id for token_id, token in added.items() if token.special and token.content not in unknown}
        self._starts = special.difference(unknown)  # a text begins after these
        self._vocab_size: int = max(tokens) + 1
        decoder = values.get("decoder")
        self.is_byte_level = are_bytes(decoder)
        self._letters = byte_of_letter()
        self._is_local = depends_on_neighbours_only(decoder)
        self._run_ids = byte_run_ids(decoder, tokens)

    @classmethod
    def load(cls, path: Path) -> JsonTokenizer:
        """Read a tokenizer.json. Raises BundleError."""
        return cls(read_text(path), source=str(path))

    @property
    def vocab_size(self) -> int:
        """The largest id that has a token, plus one."""
        return self._vocab_size

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, without any that the post-processor would add.

        The names of special tokens in it are plain text unless `special_tokens` is set; other added tokens always
        count, as in `transformers`. Half a character becomes U+FFFD.
        """
        if special_tokens and self._marked is None:
            self._marked = _build(self._text, "the tokenizer")
        return self._encode(self._marked if special_tokens else self._plain, text, surrounded=False)

    def encode_surrounded(self, text: str) -> list[int]:
        return self._encode(self._plain, text, surrounded=True)

    def _encode(self, tokenizer: Any, text: str, *, surrounded: bool) -> list[int]:
        self._check_text(text)
        text = without_halves(text)
        what = "the tokenizer cannot encode this text"
        try:
            ids: list[int] = _run(lambda: tokenizer.encode(text, add_special_tokens=surrounded).ids, PromptError, what)
        except PromptError as error:
            raise self._without_token(tokenizer, text) or error from None
        return ids

    def _without_token(self, tokenizer: Any, text: str) -> PromptError | None:
        """Return the error that names the first piece of a text that has no token; None if each has one.

        A vocabulary of characters or words often has no token for what is unknown to it.
        """
        piece = next((each for each in _pieces(tokenizer, text) if not _has_tokens(tokenizer, each)), None)
        if piece is None:
            return None
        at = text.find(piece)
        place = f", at character {at} of the text" if at >= 0 else ""
        tokens = sorted(self._tokens.values())
        accepted = f"the {len(tokens):,} tokens of the vocabulary, which has none for unknown ones"
        if all(len(token) == 1 for token in tokens):
            accepted = f"its {len(tokens):,} characters, {shown(''.join(tokens))}"
        return PromptError(f"the tokenizer has no token for {shown(piece)}{place} (accepted: {accepted})")

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`, special tokens included; an id without a token adds nothing."""
        ids = [self._checked_id(token_id) for token_id in self._checked_ids(token_ids)]
        if not ids:
            return ""  # which some decoders panic at
        what = "the tokenizer cannot decode these ids"
        text: str = _run(lambda: self._plain.decode(ids, skip_special_tokens=False), PromptError, what)
        return text

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Begin the text of ids that follow `after`; after a special token other than unknown, a new text begins."""
        if self.is_byte_level:
            return ByteStream(self.token_bytes)
        before = self._end_of(after)
        if not self._is_local:
            return DeferredStream(self.decode, before)
        return TokenStream(self.decode, before, self._run_ids, self._tokens.keys())

    def _end_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the ids that decide how the text goes on: the last token, with the run of bytes that it ends."""
        end: list[int] = []
        for token_id in reversed(token_ids):
            if token_id not in self._tokens:
                continue
            if not end and token_id in self._starts:
                return []
            end.append(token_id)
            if token_id not in self._run_ids:
                break
        return end[::-1]

    def size_bytes(self, token_ids: Iterable[int]) -> int:
        """Return how many bytes the text of `token_ids` has."""
        if self.is_byte_level:
            return sum(len(self.token_bytes(token_id)) for token_id in self._checked_ids(token_ids))
        return len(self.decode(token_ids).encode())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, none for an id without a token.

        Raises PromptError for an id beyond the vocabulary, and if not `is_byte_level`.
        """
        if not self.is_byte_level:
            raise PromptError("the tokens of this tokenizer have no bytes of their own; decode() gives their text")
        if token_id in self._added:  # plain text, perhaps normalised
            return self.decode([token_id]).encode()
        token: str = self._tokens.get(self._checked_id(token_id), "")
        try:
            return bytes(self._letters[letter] for letter in token)
        except KeyError:  # a token of the vocabulary that is not written in GPT-2's letters
            return token.encode()

    def unused_ids(self) -> Iterator[int]:
        """Return the ids below vocab_size that have no token, in order."""
        return (each for each in range(self._vocab_size) if each not in self._tokens)

    def added_ids(self) -> Iterator[int]:
        """Return the ids of added tokens, special ones among them."""
        return iter(self._added)

    def is_same(self, other: Tokenizer) -> bool:
        """Tell whether another tokenizer was read from the same settings and tokens."""
        return isinstance(other, JsonTokenizer) and json.loads(self._text) == json.loads(other._text)

    def _checked_id(self, token_id: int) -> int:
        try:
            if 0 <= token_id < self._vocab_size:
                return int(token_id)
        except TypeError:
            pass
        raise self._unknown_id(token_id)


def _build(text: str, source: str) -> Any:
    """Make an object of `tokenizers` that neither pads nor truncates."""
    with native_call:
        from tokenizers import Tokenizer as Native

    built = _run(lambda: Native.from_str(text), BundleError, f"{source} is not a tokenizer that `tokenizers` runs")
    with native_call:
        built.no_truncation()
        built.no_padding()
    return built


def _pieces(tokenizer: Any, text: str) -> list[str]:
    """Return what the model of a tokenizer is given of a text: normalised, and split."""
    with native_call:
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        if tokenizer.pre_tokenizer is None:
            return [text]
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _has_tokens(tokenizer: Any, piece: str) -> bool:
    try:
        _run(lambda: tokenizer.model.tokenize(piece), PromptError, "")
    except PromptError:
        return False
    return True


def _run(job: Callable[[], _Result], kind: type[OrtGptError], what: str) -> _Result:
    """Return what a call of `tokenizers` returns. Raises an error of `kind`, which begins with `what`."""
    try:
        with native_call:
            return job()
    except BaseException as error:  # `tokenizers` raises plain Exception, and PanicException, which is none
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            said = " ".join(str(error).split())[:200]
            raise kind(f"{what}: {said}") from None
        raise
