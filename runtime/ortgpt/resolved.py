"""Options with every choice made: what a call works with. Validates nothing; `options` has done so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortgpt.errors import OptionError

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_TOP_K = 50  # as `transformers`, when sampling

LogitsProcessor = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float32]], npt.NDArray[np.float32]]
Grammar = str | Mapping[str, Any] | Iterable[str]
Word = str | tuple[int, ...]
Seed: TypeAlias = "int | np.random.SeedSequence | np.random.Generator | None"  # numpy.random loads when used


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """Options with every choice made.

    `max_new_tokens` is what the call asked for; where that is None, `usual_new_tokens` or what the context leaves, but
    no fewer than `least_new_tokens`, which the call asked for too.
    """

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    max_new_tokens: int | None
    usual_new_tokens: int
    least_new_tokens: int
    min_new_tokens: int
    stop: tuple[str, ...]
    eos_token_ids: frozenset[int]
    seed: int | tuple[int, ...] | None
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processor: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None
    timeout_s: float | None = None
    cancel: Any = None
    num_return_sequences: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    logprobs: int | None = None
    echo: bool = False
    context_overflow: str = "error"
    keep_tokens: int = 0
    slide_tokens: int | None = None
    prompt_lookup_num_tokens: int = 0
    assistant_model: Any = None
    num_assistant_tokens: int = 5
    deterministic: bool = False

    def new_tokens_for(self, prompt_tokens: int, n_positions: int) -> int:
        """Return how many tokens to generate at most after a prompt of `prompt_tokens`."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.context_overflow == "slide":
            return max(self.least_new_tokens, self.usual_new_tokens)
        if self.context_overflow == "truncate" and prompt_tokens >= n_positions:
            prompt_tokens = n_positions - n_positions // 2
        return max(self.least_new_tokens, min(self.usual_new_tokens, n_positions - prompt_tokens))

    def seeds_for(self, row_count: int) -> list[int | None]:
        """Return one seed a row. Raises OptionError when a list of seeds has another length."""
        if not isinstance(self.seed, tuple):
            return [self.seed] * row_count
        if len(self.seed) != row_count:
            raise OptionError(
                f"seed has {len(self.seed)} values for {row_count} rows (accepted: one integer, or one a row)"
            )
        return list(self.seed)


def sequence_seed(seed: int | None, index: int) -> Seed:
    """Return the seed of a row's return sequence `index`: the first has the row's own, the others spawn from it."""
    return seed if seed is None or index == 0 else np.random.SeedSequence(seed, spawn_key=(index,))
