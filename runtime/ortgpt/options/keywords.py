"""The keywords of a generation with their types, for editors and type checkers.

Generated from GenerationOptions by `python checks/typed_keywords.py`; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ortgpt.options.resolved import Grammar, LogitsProcessor


class GenerationKeywords(TypedDict, total=False):
    """The options of a generation as keywords; None leaves a choice to the bundle, then to the default."""

    do_sample: bool | None
    """Draw each token (True), or take the most likely one (False). Default: True if temperature above 0, top_k, top_p,
    min_p, typical_p or seed is given."""
    temperature: float | None
    """Divide the logits by this before drawing; 0 is greedy. Default: 1.0."""
    top_k: int | None
    """Draw among this many most likely tokens; 0 for all. Default: 50."""
    top_p: float | None
    """Draw among the most likely tokens that together reach this probability. Default: 1.0."""
    min_p: float | None
    """Draw among the tokens that are at least this fraction as likely as the most likely one. Default: 0.0."""
    typical_p: float | None
    """Draw among the most typical tokens that together reach this probability. Default: 1.0."""
    repetition_penalty: float | None
    """Above 1, make tokens of the prompt and the continuation less likely. Default: 1.0."""
    presence_penalty: float | None
    """Subtract this from the logits of tokens that the continuation contains. Default: 0.0."""
    frequency_penalty: float | None
    """Subtract this from a token's logit for each time the continuation contains it. Default: 0.0."""
    no_repeat_ngram_size: int | None
    """Let no sequence of this many tokens occur twice in prompt and continuation; 0 for off. Default: 0."""
    bad_words: str | Iterable[str | Sequence[int]] | None
    """Never write these texts, as the tokens they encode to, or these sequences of ids. Default: none."""
    suppress_tokens: int | Iterable[int] | None
    """Never pick these token ids. Default: none."""
    logit_bias: Mapping[int, float] | None
    """Add a number to the logits of single token ids. Default: none."""
    logits_processor: LogitsProcessor | Iterable[LogitsProcessor] | None
    """Call these functions of (token_ids int64 (tokens,), logits float32 (vocab_size,)), which return new logits of
    that shape, after all other processors and before the temperature. Default: none."""
    grammar: Grammar | None
    """Let the text follow a regular expression, a JSON schema (a mapping), or a list of choices. Default: none."""
    max_new_tokens: int | None
    """Generate at most this many tokens. Default: 128, or what the context leaves."""
    min_new_tokens: int | None
    """Allow no end-of-text before this many tokens. Default: 0."""
    stop: str | Iterable[str] | None
    """End the continuation at one of these texts, which are not part of it. Default: none."""
    eos_token_id: int | Iterable[int] | None
    """End the continuation at one of these token ids; an empty list for none. Default: the checkpoint's."""
    timeout_s: float | None
    """End the continuation this many seconds after the call. Default: none."""
    cancel: Any
    """End the continuation when this threading.Event is set. Default: none."""
    seed: int | Iterable[int] | None
    """Draw reproducibly: one integer for every row, or a list with one for each row. Default: fresh entropy."""
    num_return_sequences: int | None
    """Generate this many continuations of each prompt. Default: 1."""
    num_beams: int | None
    """Search with this many beams instead of following the most likely token. Default: 1."""
    length_penalty: float | None
    """Divide a beam's score by its length to this power. Default: 1.0."""
    early_stopping: bool | str | None
    """When beams end: True, False or "never", as `transformers` defines them. Default: False."""
    logprobs: int | None
    """Report the log-probability of each token, and of this many of the most likely tokens. Default: none."""
    echo: bool | None
    """Report the log-probabilities of the prompt too. Default: False."""
    context_overflow: str | None
    """What to do beyond the context: "error", "truncate" the prompt to what leaves room, or "slide". Default: error."""
    keep_tokens: int | None
    """Keep the first tokens of the prompt, this many, when truncating or sliding. Default: 0."""
    slide_tokens: int | None
    """Drop this many tokens at once when sliding; the rest is computed again. Default: half of what may be dropped."""
    prompt_lookup_num_tokens: int | None
    """Speculative decoding from n-grams in the text so far: propose up to this many tokens. Default: off."""
    assistant_model: Any
    """Speculative decoding with a draft model: a loaded Generator of a smaller model with the same tokenizer. Default:
    none."""
    num_assistant_tokens: int | None
    """Let the draft model propose this many tokens at first. Default: 5."""
    deterministic: bool | None
    """Compute each row alone and one token a step, so that a row is the same to the bit. Default: False."""
    pad_token_id: int | None
    """Accepted and unused: padding is internal. Default: unused."""
