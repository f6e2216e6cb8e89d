"""One continuation of a prompt: its row, and the text of its tokens up to a stop string or end-of-text."""

from __future__ import annotations

from collections.abc import Sequence

from ortgpt.contract import TokenizerKind
from ortgpt.decode.row import Row
from ortgpt.options.resolved import ResolvedOptions
from ortgpt.results import Completion, Piece, Timings, TokenLogprob
from ortgpt.text.detokenizer import StopMatcher
from ortgpt.text.tokenizer import Tokenizer


class Continuation:
    """One continuation of a prompt. Text that may begin a stop string is held until it does not."""

    def __init__(self, row: Row, options: ResolvedOptions, tokenizer: Tokenizer) -> None:
        self.row = row
        self.options = options
        self.timings = Timings()
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.score: float | None = None
        self._stream = tokenizer.stream(row.prompt_ids)
        self._has_text = tokenizer.kind != TokenizerKind.NONE
        self._matcher = StopMatcher(options.stop)
        self._ready: list[str] = []  # the text that was not taken yet
        self._streamed = 0  # the ids of the pieces that were taken

    def update(self) -> None:
        """Turn the row's newest token into text; a stop string that it completes ends the row."""
        row = self.row
        if row.token_ids[-1] not in row.eos_token_ids:
            self._push(self._stream.push(row.token_ids[-1]))
        if row.finish_reason is not None and not isinstance(row.stop_reason, str):
            self._push(self._stream.finish())
        if row.finish_reason is not None and not isinstance(row.stop_reason, str):
            self._ready.append(self._matcher.finish())

    def _push(self, text: str) -> None:
        ready, stop = self._matcher.push(text)
        self._ready.append(ready)
        if stop is not None:
            self.row.finish_reason, self.row.stop_reason = "stop", stop

    def _take(self) -> str:
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def completion(self) -> Completion:
        """Return the continuation after it has ended."""
        row = self.row
        assert row.finish_reason is not None, "a sequence that was run has ended"
        return Completion(
            text=self._take(),
            token_ids=row.token_ids,
            finish_reason=row.finish_reason,
            stop_reason=row.stop_reason,
            prompt_tokens=len(row.prompt_ids),
            timings=self.timings,
            logprobs=None if row.logprobs is None else row.token_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            score=self.score,
        )

    def piece(self) -> Piece | None:
        """Return the text that came since the last piece; None if there is none and the sequence has not ended.

        Without a tokenizer, a piece is the ids that came.
        """
        row, text, begin = self.row, self._take(), self._streamed
        is_new = bool(text) if self._has_text else len(row.token_ids) > begin
        if not is_new and not row.finish_reason:
            return None
        self._streamed = len(row.token_ids)
        return Piece(
            text=text,
            token_ids=row.token_ids[begin:],
            finish_reason=row.finish_reason,
            stop_reason=row.stop_reason,
            logprobs=None if row.logprobs is None else row.token_logprobs[begin:],
        )


def text_until(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    stops: Sequence[str],
    *,
    after: Sequence[int] = (),
    ended: bool = True,
) -> tuple[str, str | None]:
    """Return the text of `token_ids`, which follow `after`, before a stop string, and the stop string or None.

    What the stream holds at the end counts only if the ids have `ended`.
    """
    stream, matcher = tokenizer.stream(after), StopMatcher(stops)
    ready = []
    parts = [*map(stream.push, token_ids)]
    for part in [*parts, stream.finish()] if ended else parts:
        text, stop = matcher.push(part)
        ready.append(text)
        if stop is not None:
            return "".join(ready), stop
    return "".join(ready) + matcher.finish(), None
