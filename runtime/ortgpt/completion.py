"""What a generation returns: whole continuations, and the pieces of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass

from ortgpt.logprobs import TokenLogprob
from ortgpt.rows import Timings


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation.

    `text` is without prompt, stop string and end-of-text; `token_ids` are all generated ids, those of a stop string and
    an end-of-text included. `finish_reason` is "stop", "length", "timeout" or "cancelled"; `stop_reason` the stop text
    or the end-of-text id that ended it, else None. With a `grammar`, "stop" with an id or None says that the text is
    whole; a stop string or any other reason may have cut it. `prompt_tokens` are those that were used; `timings` those
    of the rows that were computed together. `logprobs` has an entry for each of `token_ids`, and `prompt_logprobs` for
    each of the prompt's, where asked for. `score` is that of a beam: its log-probability over its length to the power
    of length_penalty.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a streamed continuation: whole characters, the ids behind them; the last has a `finish_reason`.

    It also has the `stop_reason`. `logprobs` has an entry for each of `token_ids` where asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
