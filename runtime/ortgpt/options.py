"""The options of a generation: named once, validated when made, resolved against a bundle's defaults.

Names and meaning are those of `transformers` generate; what differs stands in README. Knows no model.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ortgpt.errors import OptionError, UnknownOptionError
from ortgpt.messages import shown
from ortgpt.option_checks import (
    check,
    is_int,
    is_text,
    read_bias,
    read_bool,
    read_integer,
    read_number,
    read_tuple,
    read_words,
)
from ortgpt.resolved import DEFAULT_MAX_NEW_TOKENS, DEFAULT_TOP_K, Grammar, LogitsProcessor, ResolvedOptions, Word

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
# Values that ask for nothing.
NEUTRAL = {
    "num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "early_stopping": False, "echo": False,
    "keep_tokens": 0,
}  # fmt: skip
# Options that a bundle's generation_config.json may state a default of.
FROM_BUNDLE = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
    "suppress_tokens", "max_new_tokens", "min_new_tokens", "eos_token_id",
)  # fmt: skip
_OVERFLOWS = ("error", "truncate", "slide")
# What has an effect only beside another option: name, the other's name, what the other has to be.
_NEEDS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("length_penalty", "num_beams", lambda beams: (beams or 1) > 1, "num_beams above 1"),
    ("early_stopping", "num_beams", lambda beams: (beams or 1) > 1, "num_beams above 1"),
    ("echo", "logprobs", lambda count: count is not None, "logprobs"),
    ("keep_tokens", "context_overflow", lambda kind: kind in _OVERFLOWS[1:], 'context_overflow "truncate" or "slide"'),
    ("slide_tokens", "context_overflow", lambda kind: kind == "slide", 'context_overflow "slide"'),
    ("num_assistant_tokens", "assistant_model", lambda model: model is not None, "an assistant_model"),
)
# What cannot be had together with num_beams above 1, beside the options of sampling.
_NOT_WITH_BEAMS = (
    "logprobs", "prompt_lookup_num_tokens", "assistant_model", "grammar", "context_overflow", "deterministic"
)  # fmt: skip
_MOST_BEAMS = 256
_MOST_LOOKUP = 32  # tokens; more were never guessed at once with profit


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Say how to generate; None leaves a choice to the bundle's generation_config.json, then to the default.

    do_sample            draw (True) or take the most likely token (False); unset: draw if temperature > 0, top_k,
                         top_p, min_p, typical_p or seed is given
    temperature          above 0 divides the logits before drawing; 0 is greedy (default 1.0)
    top_k                draw among the k most likely; 0 for all (default 50)
    top_p                draw among the most likely that together reach this probability, 0 to 1 (default 1.0)
    min_p                draw among those at least this fraction as likely as the most likely, 0 to 1 (default 0.0)
    typical_p            draw among the most typical that together reach this probability, above 0 to 1 (default 1.0)
    repetition_penalty   above 1 makes tokens of prompt and continuation less likely (default 1.0)
    presence_penalty     subtracted from the logits of tokens that the continuation has (default 0.0)
    frequency_penalty    subtracted from them for each time it has them (default 0.0)
    no_repeat_ngram_size no sequence of this many tokens occurs twice in prompt and continuation; 0 for off (default 0)
    bad_words            texts, or sequences of ids, that are not written: the last token of each is forbidden behind
                         the ones before it
    suppress_tokens      ids that are never picked
    logit_bias           a mapping from ids to what is added to their logits
    logits_processor     your own function, or several: (token_ids int64 (tokens,), logits float32 (vocab_size,)) to
                         logits of that shape, called behind all of these and before the temperature
    grammar              what the text must be: a regular expression, a JSON schema (a mapping), or a list of choices
    max_new_tokens       at most this many tokens (default 128, or what the context leaves)
    min_new_tokens       no end-of-text before this many tokens (default 0)
    stop                 text, or several, that ends the continuation and is not part of it
    eos_token_id         id, or several, that end the continuation; an empty list for none
    timeout_s            end the continuation this many seconds after the call
    cancel               a threading.Event (or what has is_set()) that ends the continuation when it is set
    seed                 an integer for every row, or a list with one a row; None draws fresh entropy
    num_return_sequences continuations for each prompt (default 1)
    num_beams            search with this many beams instead of going on with the most likely token (default 1)
    length_penalty       the power of its length that a beam's score is divided by (default 1.0)
    early_stopping       False, True or "never", as `transformers` has them (default False)
    logprobs             report the log-probability of each token, and of this many of the most likely
    echo                 report the log-probabilities of the prompt, too
    context_overflow     what to do beyond the context: "error" (default), "truncate" the prompt, or "slide"
    keep_tokens          tokens of the prompt's beginning that truncating or sliding keeps (default 0)
    slide_tokens         tokens that sliding lets go at once (default half of what it may)
    prompt_lookup_num_tokens  guess up to this many tokens from where the text has had the last ones before
    assistant_model      a loaded Generator of a smaller model with the same tokenizer, which guesses
    num_assistant_tokens tokens that it guesses at first (default 5)
    deterministic        compute each row alone and one token a step, so that a row is the same to the bit
    pad_token_id         accepted and unused: padding is internal

    Raises OptionError naming option, value and what is accepted.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words: str | Iterable[str | Sequence[int]] | None = None
    suppress_tokens: int | Iterable[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    logits_processor: LogitsProcessor | Iterable[LogitsProcessor] | None = None
    grammar: Grammar | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | Iterable[str] | None = None
    eos_token_id: int | Iterable[int] | None = None
    timeout_s: float | None = None
    cancel: Any = None
    seed: int | Iterable[int] | None = None
    num_return_sequences: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    context_overflow: str | None = None
    keep_tokens: int | None = None
    slide_tokens: int | None = None
    prompt_lookup_num_tokens: int | None = None
    assistant_model: Any = None
    num_assistant_tokens: int | None = None
    deterministic: bool | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("do_sample", "echo", "deterministic"):
            self._set(name, read_bool(name, getattr(self, name)))
        most = sys.float_info.max
        for name, low, high, accepted in (
            ("temperature", 0.0, 1e30, "a number from 0 to 1e30"),
            ("top_p", 0.0, 1.0, "a number from 0 to 1"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1"),
            ("typical_p", 1e-9, 1.0, "a number above 0, at most 1"),
            ("repetition_penalty", 1e-3, 1e3, "a number from 0.001 to 1000"),
            ("presence_penalty", -1e3, 1e3, "a number from -1000 to 1000"),
            ("frequency_penalty", -1e3, 1e3, "a number from -1000 to 1000"),
            ("length_penalty", -10.0, 10.0, "a number from -10 to 10"),
            ("timeout_s", 1e-9, most, "a number of seconds above 0"),
        ):
            self._set(name, read_number(name, getattr(self, name), low, high, accepted))
        for name, least in (
            ("top_k", 0), ("no_repeat_ngram_size", 0), ("max_new_tokens", 1), ("min_new_tokens", 0),
            ("num_return_sequences", 1), ("logprobs", 0), ("keep_tokens", 0), ("slide_tokens", 1),
            ("num_assistant_tokens", 1), ("pad_token_id", 0),
        ):  # fmt: skip
            self._set(name, read_integer(name, getattr(self, name), least, f"an integer of {least} or more"))
        for name, largest in (("num_beams", _MOST_BEAMS), ("prompt_lookup_num_tokens", _MOST_LOOKUP)):
            accepted = f"an integer from 1 to {largest}"
            self._set(name, read_integer(name, getattr(self, name), 1, accepted, largest))
        self._read_several()
        early = self.early_stopping
        never = isinstance(early, str) and early == "never"
        check("early_stopping", early, isinstance(early, bool) or never, 'true, false or "never"')
        how = self.context_overflow
        check("context_overflow", how, isinstance(how, str) and how in _OVERFLOWS, ", ".join(_OVERFLOWS))
        asked = getattr(None if isinstance(self.cancel, type) else self.cancel, "is_set", None)
        check("cancel", self.cancel, callable(asked), "a threading.Event")
        model = self.assistant_model
        check("assistant_model", model, hasattr(model, "engine"), "a generator that ortgpt.load returned")

    def _read_several(self) -> None:
        """Read lists, arrays, mappings and generators, once."""
        text = "a text of at least one character, in whole characters"
        self._set("stop", read_tuple("stop", self.stop, is_text, text))
        for name in ("eos_token_id", "suppress_tokens"):
            self._set(name, read_tuple(name, getattr(self, name), lambda each: is_int(each, 0), "a token id"))
        self._set("bad_words", read_words("bad_words", self.bad_words))
        self._set("logit_bias", read_bias("logit_bias", self.logit_bias))
        processors = read_tuple("logits_processor", self.logits_processor, callable, "a function")
        self._set("logits_processor", processors)
        if isinstance(self.seed, numbers.Integral):
            self._set("seed", read_integer("seed", self.seed, 0, "an integer of 0 or more, or a list with one a row"))
        else:
            whole = "an integer of 0 or more"
            self._set("seed", read_tuple("seed", self.seed, lambda seed: is_int(seed, 0), whole, least=1))
        self._read_grammar()

    def _read_grammar(self) -> None:
        accepted = "a regular expression, a JSON schema, or a list of choices, in whole characters"
        if self.grammar is None or isinstance(self.grammar, Mapping):
            return
        if isinstance(self.grammar, str):
            check("grammar", self.grammar, is_text(self.grammar), accepted)
            return
        choices = read_tuple("grammar", self.grammar, is_text, accepted, least=1)
        self._set("grammar", choices)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def make(cls, options: GenerationOptions | None, keywords: Mapping[str, Any]) -> GenerationOptions:
        """Combine an options object with keywords, which win. Raises UnknownOptionError for a name not known."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in keywords if name not in known]
        if unknown:
            import difflib

            near = [match for name in unknown for match in difflib.get_close_matches(name, known, 1, 0.5)]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UnknownOptionError(f"unknown option {', '.join(unknown)}{hint} (accepted: {', '.join(known)})")
        if options is not None and not isinstance(options, cls):
            raise OptionError(f"options = {options!r} (accepted: a GenerationOptions; give single options by keyword)")
        return replace(options or cls(), **keywords)

    def resolve(
        self, defaults: GenerationOptions, encode: Callable[[str], Sequence[int]] | None = None
    ) -> ResolvedOptions:
        """Fill what is unset from the bundle's `defaults`, then from the documented ones.

        `encode` turns bad words into ids. Raises OptionError for a given option that would have no effect; a default
        without effect gives way silently.
        """
        beams = self.num_beams or 1
        sample = self._samples(defaults) and beams == 1
        self._check_together(sample)
        merged: dict[str, Any] = {
            name: getattr(self, name) if _is_given(self, name) else getattr(defaults, name) for name in FROM_BUNDLE
        }
        eos_token_ids = frozenset(merged["eos_token_id"] or ())
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens = {self.min_new_tokens} (accepted: at most max_new_tokens = {self.max_new_tokens})"
            )
        if self.min_new_tokens and not eos_token_ids:
            raise OptionError(
                f"min_new_tokens = {self.min_new_tokens} would have no effect: no eos_token_id ends the text early"
            )
        words: tuple[Word, ...] = self.bad_words or ()  # type: ignore[assignment]  # a tuple by now
        return ResolvedOptions(
            do_sample=sample,
            temperature=merged["temperature"] or 1.0,
            top_k=DEFAULT_TOP_K if merged["top_k"] is None else merged["top_k"],
            top_p=1.0 if merged["top_p"] is None else merged["top_p"],
            min_p=merged["min_p"] or 0.0,
            typical_p=merged["typical_p"] or 1.0,
            repetition_penalty=merged["repetition_penalty"] or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            no_repeat_ngram_size=merged["no_repeat_ngram_size"] or 0,
            bad_words_ids=tuple(_word_ids(word, encode) for word in words),
            suppress_tokens=frozenset(merged["suppress_tokens"] or ()),
            logit_bias=dict(self.logit_bias or {}),
            logits_processor=tuple(self.logits_processor or ()),  # type: ignore[arg-type]  # a tuple by now
            grammar=self.grammar,
            max_new_tokens=self.max_new_tokens,
            usual_new_tokens=defaults.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            least_new_tokens=self.min_new_tokens or 1,
            min_new_tokens=merged["min_new_tokens"] or 0,
            stop=tuple(self.stop or ()),
            eos_token_ids=eos_token_ids,
            timeout_s=self.timeout_s,
            cancel=self.cancel,
            seed=self.seed,  # type: ignore[arg-type]  # a tuple by now, unless an integer or None
            num_return_sequences=self.num_return_sequences or 1,
            num_beams=beams,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=False if self.early_stopping is None else self.early_stopping,
            logprobs=self.logprobs,
            echo=bool(self.echo),
            context_overflow=self.context_overflow or "error",
            keep_tokens=self.keep_tokens or 0,
            slide_tokens=self.slide_tokens,
            prompt_lookup_num_tokens=self.prompt_lookup_num_tokens or 0,
            assistant_model=self.assistant_model,
            num_assistant_tokens=self.num_assistant_tokens or 5,
            deterministic=bool(self.deterministic),
        )

    def _samples(self, defaults: GenerationOptions) -> bool:
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature == 0:
            return False
        if any(_is_given(self, name) for name in _SAMPLING):
            return True
        return bool(defaults.do_sample) and defaults.temperature != 0

    def _check_together(self, sample: bool) -> None:
        """Raise OptionError for options that exclude each other, and for those without effect."""
        beams = self.num_beams or 1
        sampling = [name for name in _SAMPLING if _is_given(self, name)]
        sampling = [name for name in sampling if not (name == "temperature" and self.temperature == 0)]
        if self.do_sample and self.temperature == 0:
            raise OptionError("temperature = 0 is greedy and do_sample = True draws: give one of them")
        if not sample and beams == 1 and sampling:
            why = "temperature = 0" if self.temperature == 0 else "do_sample = False"
            raise OptionError(
                f"{self._given(sampling)} would have no effect with {why}: leave it out, or let it sample"
            )
        for name, other, good, wanted in _NEEDS:
            if getattr(self, name) not in (None, NEUTRAL.get(name)) and not good(getattr(self, other)):
                raise OptionError(f"{self._given([name])} would have no effect without {wanted}")
        if self.grammar is not None and self.min_new_tokens:
            raise OptionError(
                f"{self._given(['min_new_tokens'])} cannot be had with a grammar, which says when a text ends"
            )
        if self.prompt_lookup_num_tokens and self.assistant_model is not None:
            raise OptionError("prompt_lookup_num_tokens and assistant_model both guess: give one of them")
        if beams > 1:
            excluded = [name for name in (*sampling, *_NOT_WITH_BEAMS) if _is_given(self, name)]
            excluded += ["do_sample"] if self.do_sample else []
            if excluded:
                raise OptionError(f"{self._given(excluded)} cannot be had with num_beams = {beams}")
            if (self.num_return_sequences or 1) > beams:
                raise OptionError(
                    f"num_return_sequences = {self.num_return_sequences} (accepted: at most num_beams = {beams})"
                )
        elif not sample and (self.num_return_sequences or 1) > 1:
            raise OptionError(
                f"num_return_sequences = {self.num_return_sequences} would be the same text again and again: let it "
                "sample, or give num_beams"
            )
        if self.deterministic:
            without = [name for name in ("prompt_lookup_num_tokens", "assistant_model") if _is_given(self, name)]
            if without:
                raise OptionError(
                    f"{self._given(without)} cannot be had with deterministic = True: it takes no guesses"
                )

    def _given(self, names: Sequence[str]) -> str:
        return ", ".join(f"{name} = {shown(getattr(self, name))}" for name in names)


def _word_ids(word: Word, encode: Callable[[str], Sequence[int]] | None) -> tuple[int, ...]:
    if not isinstance(word, str):
        return word
    if encode is None:
        raise OptionError(f"bad_words = {word!r} (accepted here: sequences of token ids)")
    return tuple(encode(word))


def _is_given(options: GenerationOptions, name: str) -> bool:
    return getattr(options, name) is not None
