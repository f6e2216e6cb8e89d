"""The keywords of a generation with their types, for editors and type checkers.

Generated from GenerationOptions by `python checks/typed_keywords.py`; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ortgpt.options.resolved import Grammar, LogitsProcessor


class GenerationKeywords(TypedDict, total=False):
    """The options of a generation as keywords; GenerationOptions says what each does."""

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    bad_words: str | Iterable[str | Sequence[int]] | None
    suppress_tokens: int | Iterable[int] | None
    logit_bias: Mapping[int, float] | None
    logits_processor: LogitsProcessor | Iterable[LogitsProcessor] | None
    grammar: Grammar | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: str | Iterable[str] | None
    eos_token_id: int | Iterable[int] | None
    timeout_s: float | None
    cancel: Any
    seed: int | Iterable[int] | None
    num_return_sequences: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
    logprobs: int | None
    echo: bool | None
    context_overflow: str | None
    keep_tokens: int | None
    slide_tokens: int | None
    prompt_lookup_num_tokens: int | None
    assistant_model: Any
    num_assistant_tokens: int | None
    deterministic: bool | None
    pad_token_id: int | None
