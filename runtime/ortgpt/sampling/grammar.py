"""Text that follows a grammar: which tokens may come next, by llguidance. Needs the extra `grammar`.

A grammar is a regular expression, a JSON schema or a list of choices. Knows no model.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortgpt.errors import OptionError, shown
from ortgpt.forks import ProcessLock
from ortgpt.native_call import native_call
from ortgpt.options.resolved import Grammar
from ortgpt.ort.package import install_hint
from ortgpt.sampling.warpers import Floats
from ortgpt.text.tokenizer import Tokenizer

_MAX_GRAMMARS = 16  # that stay compiled
# If white space were free, a small model might write it forever. A schema's own "x-guidance" wins.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes matchers for one tokenizer; the first one builds its table. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, end_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._lock = ProcessLock()
        self._table: Any = None
        self._begun: dict[str, Any] = {}  # a matcher at the beginning of each compiled grammar

    def matcher(self, grammar: Grammar, eos_token_ids: frozenset[int]) -> Matcher:
        """Return a matcher at the beginning of `grammar`.

        Raises OptionError for a grammar that llguidance does not accept, and if llguidance is not installed.
        """
        if not self._tokenizer.is_byte_level:
            raise OptionError(
                "{grammar.name} needs a byte-level tokenizer, and this bundle's, of kind {kind}, is none",
                {"grammar": grammar},
                kind=shown(self._tokenizer.kind),
            )
        if importlib.util.find_spec("llguidance") is None:
            raise OptionError(
                "{grammar.name} needs llguidance, which is not installed; {hint}",
                {"grammar": grammar},
                hint=install_hint("grammar"),
            )
        with native_call:
            import llguidance

        with self._lock.here(), native_call:
            text = _compile(llguidance, grammar)
            if self._table is None:
                self._table = self._make_table(llguidance)
            if text not in self._begun:
                failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, self._table)
                if failed:
                    raise OptionError(
                        "{grammar} is not accepted: {reason}",
                        {"grammar": grammar},
                        reason=" ".join(messages[0].split()),
                    )
                while len(self._begun) >= _MAX_GRAMMARS:
                    del self._begun[next(iter(self._begun))]
                self._begun[text] = llguidance.LLMatcher(self._table, text, log_level=0)
            # A copy shares the known states of the grammar, which are most of the work.
            return Matcher(self._begun[text].deep_copy(), self._table.eos_token, eos_token_ids)

    def _make_table(self, llguidance: Any) -> Any:
        unused = set(self._tokenizer.unused_ids()) | set(self._tokenizer.added_ids())
        tokens = [
            b"" if token_id in unused else self._tokenizer.token_bytes(token_id)
            for token_id in range(self._tokenizer.vocab_size)
        ]
        # llguidance ends a text with a token. If the model has none, an extra id serves, and is never picked.
        end_id = len(tokens) if self._end_id is None else self._end_id
        if end_id == len(tokens):
            tokens.append(b"<end>")
        names = _Names(tokens, end_id, sorted(unused | {end_id}), self._tokenizer)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(names), n_vocab=len(tokens))


class _Names:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(self, tokens: list[bytes], end_id: int, special_ids: list[int], tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self.bos_token_id = None
        self.special_token_ids = special_ids
        self._tokenizer = tokenizer
        self._id_of: dict[bytes, int] | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(data.decode())
        return ids if b"".join(map(self.tokens.__getitem__, ids)) == data else self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """Return ids of exactly these bytes, for a tokenizer that puts a space before a text, or changes letters."""
        if self._id_of is None:
            special = set(self.special_token_ids)
            self._id_of = {token: each for each, token in enumerate(self.tokens) if token and each not in special}
        ids, begin, longest = [], 0, max(map(len, self._id_of), default=0)
        while begin < len(data):
            ends = range(min(len(data), begin + longest), begin, -1)
            end = next((end for end in ends if data[begin:end] in self._id_of), None)
            if end is None:
                break
            ids.append(self._id_of[data[begin:end]])
            begin = end
        return ids


class Matcher:
    """The place of one row in its grammar."""

    def __init__(self, matcher: Any, end_id: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_id = end_id  # the id that the matcher allows where a text is complete, whichever ids end the row
        self._eos = sorted(eos_token_ids)

    def mask(self, logits: Floats) -> None:
        """Make tokens impossible, in place, that may not come next; end-of-text may if the text is complete."""
        ends = logits[self._eos] if self.complete else np.full(len(self._eos), -np.inf, np.float32)
        allowed = np.unpackbits(np.frombuffer(self._bitmask(), np.uint8), bitorder="little")
        known = min(allowed.size, logits.size)
        np.copyto(logits[:known], -np.inf, where=allowed[:known] == 0)
        logits[known:] = -np.inf
        logits[self._end_id : self._end_id + 1] = -np.inf
        logits[self._eos] = ends

    def _bitmask(self) -> bytes:
        with native_call:
            return bytes(self._matcher.compute_bitmask())

    def advance(self, token_id: int) -> bool:
        """Advance by the picked token; tell whether the text is complete and nothing may follow."""
        if token_id in self._eos:
            return True
        with native_call:
            is_accepted = self._matcher.consume_token(token_id)
        if not is_accepted:
            raise OptionError(f"the grammar cannot be followed: {' '.join(self._matcher.get_error().split())}")
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""
        return bool(self._matcher.is_accepting())


def _compile(llguidance: Any, grammar: Grammar) -> str:
    found: str
    if isinstance(grammar, str):
        found = llguidance.LLMatcher.grammar_from_regex(grammar)
    elif isinstance(grammar, Mapping):
        try:
            found = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(dict(grammar)), _JSON_STYLE)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError("{grammar} is not a JSON schema: {error}", {"grammar": grammar}, error=error) from None
    else:
        choices: Sequence[str] = tuple(grammar)
        lark = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        found = llguidance.LLMatcher.grammar_from_lark(f"start: {lark}")
    return found
