"""Options with every choice made: what a call works with. Checks nothing; GenerationOptions did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortgpt.errors import OptionError

LogitsProcessor = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float32]], npt.NDArray[np.float32]]
Grammar = str | Mapping[str, Any] | Iterable[str]
Seed: TypeAlias = "int | np.random.SeedSequence | np.random.Generator | None"  # numpy.random loads when used


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """Options with every choice made; names and meaning as in GenerationOptions."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    bad_words_ids: tuple[tuple[int, ...], ...]
    suppress_tokens: frozenset[int]
    logit_bias: Mapping[int, float]
    logits_processor: tuple[LogitsProcessor, ...]
    grammar: Grammar | None
    max_new_tokens: int | None
    """What the call gave. Where that is None, `usual_new_tokens` or what the context leaves, but not fewer than
    `least_new_tokens`."""
    usual_new_tokens: int
    least_new_tokens: int
    min_new_tokens: int
    stop: tuple[str, ...]
    eos_token_ids: frozenset[int]
    timeout_s: float | None
    cancel: Any
    seed: int | tuple[int, ...] | None
    num_return_sequences: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    logprobs: int | None
    echo: bool
    context_overflow: str
    keep_tokens: int
    slide_tokens: int | None
    prompt_lookup_num_tokens: int | None
    assistant_model: Any
    num_assistant_tokens: int
    deterministic: bool

    def new_tokens_for(self, prompt_tokens: int, n_positions: int) -> int:
        """Return the largest number of tokens to generate after a prompt of `prompt_tokens`."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.context_overflow == "slide":
            return max(self.least_new_tokens, self.usual_new_tokens)
        if self.context_overflow == "truncate" and prompt_tokens >= n_positions:
            prompt_tokens = n_positions - n_positions // 2
        return max(self.least_new_tokens, min(self.usual_new_tokens, n_positions - prompt_tokens))

    def seeds_for(self, row_count: int) -> list[int | None]:
        """Return one seed for each row. Raises OptionError when a list of seeds has another length."""
        if not isinstance(self.seed, tuple):
            return [self.seed] * row_count
        if len(self.seed) != row_count:
            raise OptionError(
                "{seed.name} has {count} values for {rows} rows (accepted: one integer, or one for each row)",
                {"seed": self.seed}, count=len(self.seed), rows=row_count,
            )  # fmt: skip
        return list(self.seed)


def sequence_seed(seed: int | None, index: int) -> Seed:
    """Return the seed of a row's return sequence `index`: the first has the row's own, the others spawn from it."""
    return seed if seed is None or index == 0 else np.random.SeedSequence(seed, spawn_key=(index,))
