"""The options of a generation: declared once, checked when the object is made, resolved against a bundle's defaults.

Names and meaning are those of `transformers` generate; docs/differences.md lists what differs. Knows no model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ortgpt.errors import OptionError, UnknownOptionError
from ortgpt.options.exclusions import OVERFLOWS, SAMPLING, check_together
from ortgpt.options.names import did_you_mean
from ortgpt.options.option import Flag, Option, option
from ortgpt.options.resolved import Grammar, LogitsProcessor, ResolvedOptions
from ortgpt.options.validation import (
    biases,
    boolean,
    choice,
    grammar,
    having,
    integer,
    number,
    seeds,
    several,
    texts,
    token_ids,
    words,
)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Say how to generate. None leaves a choice to the bundle's generation_config.json, then to the default.

    Raises OptionError that names option, value and what is accepted.
    """

    do_sample: bool | None = option(
        boolean(), "Sample each token (True), or take the most likely one (False).",
        Flag("--greedy", type=bool, help="Take the most likely token at each step."),
        default_text="True if temperature above 0, top_k, top_p, min_p, typical_p or seed is given", from_bundle=True,
    )  # fmt: skip
    temperature: float | None = option(
        number(0.0, 1e30, "a number from 0 to 1e30"), "Divide the logits by this before sampling; 0 is greedy.",
        Flag("--temperature", "F", float), default=1.0, from_bundle=True, elsewhere=("temp",),
    )  # fmt: skip
    top_k: int | None = option(
        integer(0), "Sample among this many most likely tokens; 0 for all.",
        Flag("--top-k", "N", int), default=50, from_bundle=True,
    )  # fmt: skip
    top_p: float | None = option(
        number(0.0, 1.0, "a number from 0 to 1"),
        "Sample among the most likely tokens that together reach this probability.",
        Flag("--top-p", "F", float), default=1.0, from_bundle=True,
    )  # fmt: skip
    min_p: float | None = option(
        number(0.0, 1.0, "a number from 0 to 1"),
        "Sample among the tokens that are at least this fraction as likely as the most likely one.",
        Flag("--min-p", "F", float), default=0.0, from_bundle=True,
    )  # fmt: skip
    typical_p: float | None = option(
        number(1e-9, 1.0, "a number above 0, at most 1"),
        "Sample among the most typical tokens that together reach this probability.",
        Flag("--typical-p", "F", float), default=1.0, from_bundle=True, elsewhere=("typical",),
    )  # fmt: skip
    repetition_penalty: float | None = option(
        number(1e-3, 1e3, "a number from 0.001 to 1000"),
        "Above 1, make tokens of the prompt and the continuation less likely.",
        Flag("--repetition-penalty", "F", float), default=1.0, from_bundle=True, elsewhere=("repeat_penalty",),
    )  # fmt: skip
    presence_penalty: float | None = option(
        number(-1e3, 1e3, "a number from -1000 to 1000"),
        "Subtract this from the logits of tokens that the continuation contains.",
        Flag("--presence-penalty", "F", float), default=0.0,
    )  # fmt: skip
    frequency_penalty: float | None = option(
        number(-1e3, 1e3, "a number from -1000 to 1000"),
        "Subtract this from a token's logit for each time the continuation contains it.",
        Flag("--frequency-penalty", "F", float), default=0.0,
    )  # fmt: skip
    no_repeat_ngram_size: int | None = option(
        integer(0), "Let no sequence of this many tokens occur twice in prompt and continuation; 0 for off.",
        Flag("--no-repeat-ngram-size", "N", int), default=0, from_bundle=True,
    )  # fmt: skip
    bad_words: str | Iterable[str | Sequence[int]] | None = option(
        words(), "Never write these texts, as the tokens they encode to, or these sequences of ids.",
        Flag("--bad-words", "TEXT", repeatable=True), default=(), default_text="none",
        from_bundle=True, bundle_key="bad_words_ids", elsewhere=("bad_words_ids",),
    )  # fmt: skip
    suppress_tokens: int | Iterable[int] | None = option(
        token_ids(), "Never pick these token ids.",
        Flag("--suppress-tokens", "ID", int, repeatable=True), default=(), default_text="none", from_bundle=True,
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = option(
        biases(), "Add a number to the logits of single token ids.",
        Flag("--logit-bias", "ID=F", repeatable=True), default={}, default_text="none",
        elsewhere=("sequence_bias",),
    )  # fmt: skip
    logits_processor: LogitsProcessor | Iterable[LogitsProcessor] | None = option(
        several(callable, "a function"),
        "Call these functions of (token_ids int64 (tokens,), logits float32 (vocab_size,)), which return new logits of "
        "that shape, after all other processors and before the temperature.",
        default=(), default_text="none",
    )  # fmt: skip
    grammar: Grammar | None = option(
        grammar(), "Let the text follow a regular expression, a JSON schema (a mapping), or a list of choices.",
        Flag("--grammar-regex", "REGEX", help="Let the text match REGEX."),
        Flag("--grammar-json-schema", "FILE|JSON", help="Let the text be JSON of this schema."),
        Flag("--grammar-choice", "TEXT", repeatable=True, help="Let the text be one of these."),
        default_text="none", elsewhere=("guided_json", "guided_regex", "guided_choice", "json_schema"),
    )  # fmt: skip
    max_new_tokens: int | None = option(
        integer(1), "Generate at most this many tokens.",
        Flag("--max-new-tokens", "N", int), default=128, default_text="128, or what the context leaves",
        from_bundle=True, elsewhere=("max_tokens", "n_predict", "max_completion_tokens"),
    )  # fmt: skip
    min_new_tokens: int | None = option(
        integer(0), "Allow no end-of-text before this many tokens.",
        Flag("--min-new-tokens", "N", int), default=0, from_bundle=True, elsewhere=("min_tokens",),
    )  # fmt: skip
    stop: str | Iterable[str] | None = option(
        texts(), "End the continuation at one of these texts, which are not part of it.",
        Flag("--stop", "TEXT", repeatable=True), default=(), default_text="none",
        elsewhere=("stop_strings", "stop_sequences"),
    )  # fmt: skip
    eos_token_id: int | Iterable[int] | None = option(
        token_ids(), "End the continuation at one of these token ids; an empty list for none.",
        Flag("--eos-token-id", "ID", int, repeatable=True), default=(), default_text="the checkpoint's",
        from_bundle=True, elsewhere=("stop_token_ids",),
    )  # fmt: skip
    timeout_s: float | None = option(
        number(1e-9, sys.float_info.max, "a number of seconds above 0"),
        "End the continuation this many seconds after the call; for a stream, after its first piece is requested.",
        Flag("--timeout", "S", float), default_text="none", elsewhere=("max_time", "timeout"),
    )  # fmt: skip
    cancel: Any = option(
        having("is_set", "a threading.Event", method=True), "End the continuation when this threading.Event is set.",
        default_text="none",
    )  # fmt: skip
    seed: int | Iterable[int] | None = option(
        seeds(), "Sample reproducibly: one integer for every row, or a list with one for each row.",
        Flag("--seed", "N", int), default_text="fresh entropy", elsewhere=("random_seed", "manual_seed"),
    )  # fmt: skip
    num_return_sequences: int | None = option(
        integer(1), "Generate this many continuations of each prompt.",
        Flag("--num-return-sequences", "N", int, in_chat=False), default=1, elsewhere=("n",),
    )  # fmt: skip
    num_beams: int | None = option(
        integer(1, 256), "Search with this many beams instead of following the most likely token.",
        Flag("--num-beams", "N", int, in_chat=False), default=1, elsewhere=("beam_size", "use_beam_search"),
    )  # fmt: skip
    length_penalty: float | None = option(
        number(-10.0, 10.0, "a number from -10 to 10"),
        "Divide a beam's score by its length to this power.",
        Flag("--length-penalty", "F", float, in_chat=False), default=1.0,
    )  # fmt: skip
    early_stopping: bool | str | None = option(
        choice("never", accepted='true, false or "never"', booleans=True),
        'When beams end: True, False or "never", as `transformers` defines them.',
        Flag("--early-stopping", "HOW", in_chat=False), default=False,
    )  # fmt: skip
    logprobs: int | None = option(
        integer(0), "Report the log-probability of each token, and of this many of the most likely tokens.",
        Flag("--logprobs", "K", int, in_chat=False), default_text="none", elsewhere=("output_scores", "top_logprobs"),
    )  # fmt: skip
    echo: bool | None = option(
        boolean(), "Report the log-probabilities of the prompt too.",
        Flag("--echo", type=bool, help="Write the prompt too (with --logprobs, its log-probabilities).", in_chat=False),
        default=False, elsewhere=("prompt_logprobs",),
    )  # fmt: skip
    context_overflow: str | None = option(
        choice(*OVERFLOWS),
        'What to do beyond the context: "error", "truncate" the prompt to what leaves room, or "slide".',
        Flag("--context-overflow", "HOW", in_chat=False), default="error", elsewhere=("context_shift", "truncation"),
    )  # fmt: skip
    keep_tokens: int | None = option(
        integer(0), "Keep the first tokens of the prompt, this many, when truncating or sliding.",
        Flag("--keep-tokens", "N", int, in_chat=False), default=0, elsewhere=("n_keep",),
    )  # fmt: skip
    slide_tokens: int | None = option(
        integer(1), "Drop this many tokens at once when sliding; the rest is computed again.",
        Flag("--slide-tokens", "N", int, in_chat=False), default_text="half of what may be dropped",
        elsewhere=("n_discard",),
    )  # fmt: skip
    prompt_lookup_num_tokens: int | None = option(
        integer(1, 32), "Speculative decoding from n-grams in the text so far: propose up to this many tokens.",
        Flag("--prompt-lookup", "N", int), default_text="off",
    )  # fmt: skip
    assistant_model: Any = option(
        having("engine", "a generator that ortgpt.load returned"),
        "Speculative decoding with a draft model: a loaded Generator of a smaller model with the same tokenizer.",
        Flag("--assistant", "BUNDLE", help="Speculative decoding with the smaller model in BUNDLE."),
        default_text="none", elsewhere=("draft_model",),
    )  # fmt: skip
    num_assistant_tokens: int | None = option(
        integer(1), "Let the draft model propose this many tokens at first.",
        Flag("--assistant-tokens", "N", int), default=5,
        elsewhere=("num_speculative_tokens", "draft_max"),
    )  # fmt: skip
    deterministic: bool | None = option(
        boolean(), "Compute each row alone and one token a step, so that a row is the same to the bit.",
        Flag("--deterministic", type=bool), default=False,
    )  # fmt: skip
    pad_token_id: int | None = option(integer(0), "Accepted and unused: padding is internal.", default_text="unused")

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            object.__setattr__(self, name, declared.rule.read(name, getattr(self, name)))

    @classmethod
    def make(cls, options: GenerationOptions | None, keywords: Mapping[str, Any]) -> GenerationOptions:
        """Combine an options object with keywords, which win; without keywords, return the object itself.

        Raises UnknownOptionError for a keyword that is not an option, OptionError for one with a bad value.
        """
        unknown = [name for name in keywords if name not in OPTIONS]
        if unknown:
            raise UnknownOptionError(f"unknown option {', '.join(unknown)}{did_you_mean(unknown, OPTIONS)}")
        if options is not None and not isinstance(options, cls):
            raise OptionError.bad_value("options", options, "a GenerationOptions; give single options by keyword")
        if options is None:
            return cls(**keywords)
        return replace(options, **keywords) if keywords else options

    def resolve(
        self, defaults: GenerationOptions, encode: Callable[[str], Sequence[int]] | None = None
    ) -> ResolvedOptions:
        """Fill what is unset from the bundle's `defaults`, then from the documented ones.

        `encode` turns bad words into ids. Raises OptionError for an option of the call that would have no effect; a
        default without effect gives way silently.
        """
        sample = self._samples(defaults) and (self.num_beams or 1) == 1
        check_together({name: getattr(self, name) for name in OPTIONS}, OPTIONS, sample)
        values: dict[str, Any] = {}
        for name, declared in OPTIONS.items():
            value = getattr(self, name)
            if value is None and declared.from_bundle:
                value = getattr(defaults, name)
            values[name] = declared.default if value is None else value
        if self.min_new_tokens and not values["eos_token_id"]:
            raise OptionError(
                "{min_new_tokens} would have no effect: no {eos_token_id.name} ends the text early",
                {"min_new_tokens": self.min_new_tokens, "eos_token_id": ()},
            )
        del values["pad_token_id"]
        bad_words, eos_token_ids = values.pop("bad_words"), values.pop("eos_token_id")
        values |= {
            "do_sample": sample,
            "temperature": values["temperature"] or 1.0,
            "bad_words_ids": tuple(_word_ids(word, encode) for word in bad_words),
            "suppress_tokens": frozenset(values["suppress_tokens"]),
            "eos_token_ids": frozenset(eos_token_ids),
            "max_new_tokens": self.max_new_tokens,
            "usual_new_tokens": defaults.max_new_tokens or OPTIONS["max_new_tokens"].default,
            "least_new_tokens": self.min_new_tokens or 1,
        }
        return ResolvedOptions(**values)

    def _samples(self, defaults: GenerationOptions) -> bool:
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature == 0:
            return False
        if any(getattr(self, name) is not None for name in SAMPLING):
            return True
        return bool(defaults.do_sample) and defaults.temperature != 0


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(GenerationOptions)}
GenerationOptions.__doc__ = "\n".join(
    [f"{GenerationOptions.__doc__}\n", *(f"    {name}: {declared.help}" for name, declared in OPTIONS.items())]
)


def _word_ids(word: str | tuple[int, ...], encode: Callable[[str], Sequence[int]] | None) -> tuple[int, ...]:
    if not isinstance(word, str):
        return word
    if encode is None:
        raise OptionError.bad_value("bad_words", word, "sequences of token ids, where there is no tokenizer")
    return tuple(encode(word))
