"""Which tokens the model sees of a text that is longer than its context. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortgpt.errors import OptionError
from ortgpt.resolved import ResolvedOptions


@dataclass(frozen=True)
class Window:
    """Which of a row's tokens the model sees: the first `keep`, and the newest.

    Positions are learned, so a token cannot move: where the context is full, `stride` tokens behind the kept ones are
    let go at once, and the rest is computed anew from position `keep` on. What is seen of a text depends on its length
    only. With `stride` 0 a text beyond the context does not occur.
    """

    n_positions: int
    keep: int = 0
    stride: int = 0

    def of(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are seen of `ids`."""
        over = len(ids) - self.n_positions
        if over <= 0:
            return ids
        assert self.stride, "a row without a stride fits its context"
        gone = -(-over // self.stride) * self.stride
        return [*ids[: self.keep], *ids[self.keep + gone :]]


def fit_prompt(
    options: ResolvedOptions, prompt_ids: Sequence[int], n_positions: int
) -> tuple[Sequence[int], int, Window]:
    """Return a row's prompt, how many new tokens it gets at most, and what the model sees of both.

    Raises OptionError where the tokens to keep leave no room. What still exceeds the context, the engine refuses.
    """
    new_tokens = options.new_tokens_for(len(prompt_ids), n_positions)
    overflow, keep = options.context_overflow, options.keep_tokens
    if overflow == "slide":
        most = n_positions - keep - 1
        stride = max(1, most // 2) if options.slide_tokens is None else options.slide_tokens
        if keep > n_positions - 2:
            raise OptionError(f"keep_tokens = {keep} (accepted: at most {n_positions - 2}, two less than the context)")
        if not 1 <= stride <= most:
            raise OptionError(
                f"slide_tokens = {stride} with keep_tokens = {keep} (accepted: together at most {n_positions - 1}, one "
                "less than the context)"
            )
        return prompt_ids, new_tokens, Window(n_positions, keep, stride)
    room = n_positions - new_tokens
    if overflow == "truncate" and len(prompt_ids) > room >= 1:
        if keep >= room:
            raise OptionError(
                f"keep_tokens = {keep} (accepted: at most {room - 1}: {new_tokens} new tokens leave room for a prompt "
                f"of {room})"
            )
        prompt_ids = [*prompt_ids[:keep], *prompt_ids[len(prompt_ids) - (room - keep) :]]
    return prompt_ids, new_tokens, Window(n_positions)
