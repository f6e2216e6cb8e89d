"""One sequence of a batch in flight: its tokens, its limits, and what decides its next one. Runs nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortgpt.context import Window
from ortgpt.logprobs import TokenLogprob

Logits = npt.NDArray[np.float32]


class Pick(Protocol):
    """Picks a row's next token, from all its logits or from enough of the largest; see `picker.Picker`."""

    @property
    def count(self) -> int | None: ...
    @property
    def penalty(self) -> float: ...
    def penalized_ids(self, ids: Sequence[int]) -> npt.NDArray[np.int64]: ...
    def __call__(self, logits: Logits, ids: Sequence[int]) -> int: ...
    def among(self, few: npt.NDArray[np.int64], logits: Logits, ids: Sequence[int]) -> int: ...


class Guesser(Protocol):
    """Guesses what a row goes on with; see `guessers`."""

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` ids that may follow `ids`."""
        ...

    def learn(self, proposed: int, accepted: int) -> None:
        """Hear how many of the proposed ids were right."""
        ...


class Grammar(Protocol):
    """What a row's text has to be; see `grammar.Matcher`."""

    @property
    def complete(self) -> bool: ...
    def advance(self, token_id: int) -> bool: ...


@dataclass(kw_only=True, eq=False)
class Row:
    """One sequence of a batch: its prompt, its limits, and how its next token is picked.

    `pick` gets the logits (vocab_size,), which it may change, or the largest of them, and all ids so far. `logprobs`
    asks for the likelihood of each token and of so many others. `window` says what the model sees where the text is
    longer than its context; None where it never is. `deadline` is a time of time.perf_counter().
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    pick: Pick
    window: Window | None = None
    guess: Guesser | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    deadline: float | None = None
    cancel: Any = None
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.ids = [*self.prompt_ids, *self.token_ids]

    def seen(self) -> Sequence[int]:
        """Return the tokens that the model sees."""
        return self.ids if self.window is None else self.window.of(self.ids)

    def room(self, n_positions: int) -> int:
        """Return how many positions the row fills at most; its last token is never fed back."""
        return min(len(self.prompt_ids) + self.max_new_tokens - 1, n_positions)

    def extend(self, token_id: int) -> None:
        """Take the next token, and note whether it was the last."""
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
        """Return why the row has to end before its time, or None."""
        if self.cancel is not None and self.cancel.is_set():
            return "cancelled"
        if self.deadline is not None and time.perf_counter() >= self.deadline:
            return "timeout"
        return None


@dataclass
class Timings:
    """Wall time of one call in seconds: checking and encoding the prompt, prefill, and the steps after it."""

    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
