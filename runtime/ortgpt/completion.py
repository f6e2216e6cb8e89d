"""What a generation returns: whole continuations, and the pieces of a streamed one."""

from __future__ import annotations

from dataclasses import dataclass

from ortgpt.logprobs import TokenLogprob
from ortgpt.rows import Timings


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation.

    `text` is without prompt, stop string and end-of-text; `token_ids` are all generated ids, including an end-of-text.
    `finish_reason` is "stop", "length", "timeout" or "cancelled"; `stop_reason` the stop string or the end-of-text id
    that ended it, else None: with a `grammar`, "stop" says that the text is whole, and any other reason that it may not
    be. `prompt_tokens` are those that were used; `timings` those of the rows that were computed together. `logprobs`
    has an entry for each of `token_ids`, and `prompt_logprobs` for each of the prompt's, where asked for. `score` is
    that of a beam: its log-probability over its length to the power of length_penalty.
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

    `logprobs` has an entry for each of `token_ids` where asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
