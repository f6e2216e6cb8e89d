"""One sequence of a batch: its tokens, its limits, and what decides its next token. Runs nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ortgpt.decode.context_window import ContextWindow
from ortgpt.decode.drafts import Draft
from ortgpt.engine.kv_cache import RowKV
from ortgpt.results import TokenLogprob
from ortgpt.sampling.grammar import Matcher
from ortgpt.sampling.sampler import Sampler


@dataclass(kw_only=True, eq=False)
class Row:
    """One sequence of a batch: its prompt, its limits, and how its next token is picked."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    sampler: Sampler
    window: ContextWindow | None = None
    """Which tokens the model sees of a text that is longer than its context; None if it never is."""
    draft: Draft | None = None
    """Proposes tokens for speculative decoding."""
    grammar: Matcher | None = None
    logprobs: int | None = None
    """How many of the most likely tokens to report beside each picked one; None to report nothing."""
    prompt_kv: RowKV | None = None
    """The keys and values of the prompt's tokens but the last, if they were computed before."""
    deadline: float | None = None
    """A time of time.perf_counter() at which the row ends."""
    cancel: Any = None
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.ids = [*self.prompt_ids, *self.token_ids]

    def visible_ids(self) -> Sequence[int]:
        """Return the tokens that the model sees."""
        return self.ids if self.window is None else self.window.of(self.ids)

    @property
    def slides(self) -> bool:
        """Whether the model may lose sight of tokens, so that the cache does not hold a beginning of the text."""
        return self.window is not None and self.window.stride > 0

    def max_positions(self, n_positions: int) -> int:
        """Return how many positions of a cache the row fills at most; its last token is never fed back."""
        return min(len(self.prompt_ids) + self.max_new_tokens - 1, n_positions)

    def extend(self, token_id: int) -> None:
        """Append the next token, and note whether it was the last."""
        self.token_ids.append(token_id)
        self.ids.append(token_id)
        if token_id in self.eos_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif self.grammar is not None and self.grammar.advance(token_id):
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "stop" if self.grammar is not None and self.grammar.complete else "length"
        else:
            self.finish_reason = self.interruption()

    def interruption(self) -> str | None:
        """Return why the row has to end early, or None."""
        if self.cancel is not None and self.cancel.is_set():
            return "cancelled"
        if self.deadline is not None and time.perf_counter() >= self.deadline:
            return "timeout"
        return None
