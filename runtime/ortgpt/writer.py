"""From one row's tokens to text, up to a stop string or end-of-text; ends the row where a stop string is found."""

from __future__ import annotations

from collections.abc import Sequence

from ortgpt.rows import Row
from ortgpt.tokenizer import StopMatcher, TextStream, Tokenizer


class Writer:
    """Turns one row's tokens into text; what may begin a stop string is held back until it does not."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._matcher = StopMatcher(stops)
        self._ready: list[str] = []

    def update(self, row: Row) -> None:
        """Take the row's newest token."""
        if row.token_ids[-1] not in row.eos_token_ids:
            self._feed(self._stream.push(row.token_ids[-1]), row)
        if row.finish_reason is not None and not isinstance(row.stop_reason, str):
            self._feed(self._stream.finish(), row)
        if row.finish_reason is not None and not isinstance(row.stop_reason, str):
            self._ready.append(self._matcher.finish())

    def _feed(self, text: str, row: Row) -> None:
        shown, stop = self._matcher.push(text)
        self._ready.append(shown)
        if stop is not None:
            row.finish_reason, row.stop_reason = "stop", stop

    def take(self) -> str:
        """Return the text that is ready, once."""
        text = "".join(self._ready)
        self._ready.clear()
        return text


def text_until(tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text of `token_ids` before a stop string, and the stop string or None."""
    stream, matcher = TextStream(tokenizer), StopMatcher(stops)
    parts = [*map(stream.push, token_ids), stream.finish()]
    shown = []
    for part in parts:
        text, stop = matcher.push(part)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop
    return "".join(shown) + matcher.finish(), None
