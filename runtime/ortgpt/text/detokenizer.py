"""Text from a growing sequence of ids: whole characters, and stop strings cut off. Knows no model."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Collection, Sequence

from ortgpt.text.tokenizer import TextStream


class ByteStream(TextStream):
    """The text of ids whose bytes are joined; the bytes of an incomplete character are held."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""
        return self._decoder.decode(self._token_bytes(token_id))

    @property
    def is_whole(self) -> bool:
        """Whether no character is incomplete."""
        return not self._decoder.getstate()[0]

    def finish(self) -> str:
        """Return U+FFFD for a character that is still incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


class TokenStream(TextStream):
    """The text of ids where what a token adds depends on the token before it, a run of bytes counting as one.

    Only the last tokens are decoded: one that gave text, and those after it. Those of a run of bytes are held until the
    run ends, since one byte that does not fit makes U+FFFD of all.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        before: list[int],
        run_ids: Collection[int],
        known_ids: Collection[int],
    ) -> None:
        """Continue a text that ends with the tokens `before`; ids that are not in `known_ids` have no token."""
        self._decode = decode
        self._run_ids = run_ids
        self._known_ids = known_ids
        self._last_ids = before
        self._written = decode(before)  # the text of _last_ids that was returned
        self._is_run = False

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` adds, and that of a run of bytes which it ends."""
        if token_id not in self._known_ids:
            return ""
        self._last_ids.append(token_id)
        self._is_run = token_id in self._run_ids
        if self._is_run:
            return ""
        text = self._new_text()
        if text:
            self._last_ids = [token_id]
            self._written = self._decode(self._last_ids)
        return text

    def _new_text(self) -> str:
        text = self._decode(self._last_ids)
        # Bytes that were U+FFFD at the end of a prompt may become a character with those after them.
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, self._written, strict=False))
        return text[len([*same]) :]

    @property
    def is_whole(self) -> bool:
        """Whether no run of bytes is held."""
        return not self._is_run

    def finish(self) -> str:
        """Return the text of a run of bytes that is held."""
        return self._new_text() if self._is_run else ""


class DeferredStream(TextStream):
    """The text of ids whose decoder looks at the whole text: it comes at the end."""

    def __init__(self, decode: Callable[[list[int]], str], before: list[int]) -> None:
        self._decode = decode
        self._before = before
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        """Hold an id; return nothing."""
        self._ids.append(token_id)
        return ""

    @property
    def is_whole(self) -> bool:
        """Whether there is no id yet."""
        return not self._ids

    def finish(self) -> str:
        """Return the text of all ids."""
        ids, self._ids = self._ids, []
        return self._decode([*self._before, *ids])[len(self._decode(self._before)) :] if ids else ""


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, and holds back what may be the beginning of one.

    The stop string that is complete first ends the text, wherever the pieces are cut; of two that end together, the
    longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certain, and the stop string that ended it or None."""
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
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
