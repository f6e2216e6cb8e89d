"""Which tokens the model sees of a text that is longer than its context. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortgpt.errors import OptionError
from ortgpt.options.resolved import ResolvedOptions


@dataclass(frozen=True)
class ContextWindow:
    """Which of a row's tokens the model sees: the first `keep`, and the newest.

    Positions are learned, so the keys and values of a token cannot move. When the context is full, the `stride` tokens
    after the kept ones are dropped at once, and the rest is computed again from position `keep` on. What the model sees
    depends only on the length of the text. With `stride` 0 a text never exceeds the context.
    """

    n_positions: int
    keep: int = 0
    stride: int = 0

    def of(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens of `ids` that the model sees."""
        over = len(ids) - self.n_positions
        if over <= 0:
            return ids
        assert self.stride, "a row without a stride fits its context"
        dropped = -(-over // self.stride) * self.stride
        return [*ids[: self.keep], *ids[self.keep + dropped :]]


def fit_prompt(
    options: ResolvedOptions, prompt_ids: Sequence[int], n_positions: int
) -> tuple[Sequence[int], int, ContextWindow]:
    """Return a row's prompt, its largest number of new tokens, and which tokens the model sees.

    Raises OptionError if the tokens to keep leave no room. check_context() refuses what still exceeds the context.
    """
    new_tokens = options.new_tokens_for(len(prompt_ids), n_positions)
    overflow, keep = options.context_overflow, options.keep_tokens
    if overflow == "slide":
        most = n_positions - keep - 1
        stride = max(1, most // 2) if options.slide_tokens is None else options.slide_tokens
        if keep > n_positions - 2:
            raise OptionError.bad_value("keep_tokens", keep, f"at most {n_positions - 2}, two less than the context")
        if not 1 <= stride <= most:
            raise OptionError(
                "{slide_tokens} with {keep_tokens} (accepted: together at most {most}, one less than the context)",
                {"slide_tokens": stride, "keep_tokens": keep},
                most=n_positions - 1,
            )
        return prompt_ids, new_tokens, ContextWindow(n_positions, keep, stride)
    room = n_positions - new_tokens
    if overflow == "truncate" and len(prompt_ids) > room >= 1:
        if keep >= room:
            raise OptionError.bad_value(
                "keep_tokens", keep, f"at most {room - 1}: {new_tokens} new tokens leave room for a prompt of {room}"
            )
        prompt_ids = [*prompt_ids[:keep], *prompt_ids[len(prompt_ids) - (room - keep) :]]
    return prompt_ids, new_tokens, ContextWindow(n_positions)
