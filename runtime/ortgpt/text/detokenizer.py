"""Text from a growing sequence of ids: whole characters, and stop strings cut off. Knows no model."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ortgpt.text.tokenizer import Tokenizer


class TextStream:
    """The text of a growing sequence of ids: whole characters, incomplete ones held until they are complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    @property
    def is_whole(self) -> bool:
        """Whether no character is incomplete."""
        return not self._decoder.getstate()[0]

    def finish(self) -> str:
        """Return U+FFFD for a character that is still incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


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
