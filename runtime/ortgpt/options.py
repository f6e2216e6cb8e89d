"""The options of a generation: named once, validated when made, resolved against a bundle's defaults.

Names and meaning are those of `transformers` generate; what differs stands in README. Knows no model.
"""

from __future__ import annotations

import logging
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ortgpt.errors import OptionError, UnknownOptionError

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_TOP_K = 50  # as `transformers`, when sampling

_SAMPLING = ("temperature", "top_k", "top_p", "seed")
# Keys of a generation_config.json that have no bearing here; any other unknown one is logged when the bundle is loaded.
_WITHOUT_BEARING = frozenset(
    {"transformers_version", "_from_model_config", "bos_token_id", "pad_token_id", "use_cache", "output_attentions",
     "output_hidden_states", "return_dict_in_generate", "output_scores"}
)  # fmt: skip
# Values of keys not used here that ask for nothing.
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "typical_p": 1.0,
}
_FROM_BUNDLE = (
    "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "min_new_tokens",
    "eos_token_id",
)  # fmt: skip

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Say how to generate; None leaves a choice to the bundle's generation_config.json, then to the default.

    do_sample            draw (True) or take the most likely token (False); unset: draw if temperature > 0, top_k,
                         top_p or seed is given
    temperature          above 0 divides the logits before drawing; 0 is greedy (default 1.0)
    top_k                draw among the k most likely; 0 for all (default 50)
    top_p                draw among the most likely that together reach this probability, 0 to 1 (default 1.0)
    repetition_penalty   above 1 makes tokens of prompt and continuation less likely (default 1.0)
    max_new_tokens       at most this many tokens (default 128, or what the context leaves)
    min_new_tokens       no end-of-text before this many tokens (default 0)
    stop                 text, or several, that ends the continuation and is not part of it
    eos_token_id         id, or several, that end the continuation; an empty list for none
    pad_token_id         accepted and unused: padding is internal
    seed                 an integer for every row, or a list with one a row; None draws fresh entropy

    Raises OptionError naming option, value and what is accepted.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | Iterable[str] | None = None
    eos_token_id: int | Iterable[int] | None = None
    pad_token_id: int | None = None
    seed: int | Iterable[int] | None = None

    def __post_init__(self) -> None:
        _check("do_sample", self.do_sample, isinstance(self.do_sample, bool), "true or false")
        self._set_number("temperature", 0.0, sys.float_info.max, "a number of 0 or more")
        self._set_integer("top_k", 0, "an integer of 0 or more")
        self._set_number("top_p", 0.0, 1.0, "a number from 0 to 1")
        self._set_number("repetition_penalty", 1e-3, 1e3, "a number from 0.001 to 1000")
        self._set_integer("max_new_tokens", 1, "an integer of 1 or more")
        self._set_integer("min_new_tokens", 0, "an integer of 0 or more")
        self._set_integer("pad_token_id", 0, "a token id")
        # Lists, arrays and generators are read once, here.
        self._set_tuple("stop", lambda stop: isinstance(stop, str) and stop != "", "a text of at least one character")
        self._set_tuple("eos_token_id", lambda token_id: _is_int(token_id, 0), "a token id")
        if isinstance(self.seed, numbers.Integral):
            self._set_integer("seed", 0, "an integer of 0 or more, or a list with one a row")
        else:
            self._set_tuple("seed", lambda seed: _is_int(seed, 0), "an integer of 0 or more", least=1)

    def _set_number(self, name: str, low: float, high: float, accepted: str) -> None:
        """Turn any kind of real number, numpy's included, into a float."""
        value = getattr(self, name)
        number = _as_float(value)
        _check(name, value, number is not None and low <= number <= high, accepted)
        object.__setattr__(self, name, number)

    def _set_integer(self, name: str, least: int, accepted: str) -> None:
        """Turn any kind of integer, numpy's included, into an int."""
        value: Any = getattr(self, name)
        _check(name, value, _is_int(value, least), accepted)
        if value is not None:
            object.__setattr__(self, name, int(value))

    def _set_tuple(self, name: str, accepts: Callable[[Any], bool], accepted: str, least: int = 0) -> None:
        """Turn a single value or an iterable of at least `least` of them into a tuple, each value checked."""
        value = getattr(self, name)
        if value is None:
            return
        values = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        good = len(values) >= least and all(map(accepts, values))
        _check(name, value, good, f"{accepted}, or a list of such")
        object.__setattr__(self, name, tuple(int(item) if _is_int(item, 0) else item for item in values))

    @classmethod
    def make(cls, options: GenerationOptions | None, keywords: Mapping[str, Any]) -> GenerationOptions:
        """Combine an options object with keywords, which win. Raises UnknownOptionError for a name not known."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in keywords if name not in known]
        if unknown:
            raise UnknownOptionError(f"unknown option {', '.join(unknown)} (accepted: {', '.join(known)})")
        if options is not None and not isinstance(options, cls):
            raise OptionError(f"options = {options!r} (accepted: a GenerationOptions; give single options by keyword)")
        return replace(options or cls(), **keywords)

    def resolve(self, defaults: GenerationOptions) -> ResolvedOptions:
        """Fill what is unset from the bundle's `defaults`, then from the documented ones.

        Raises OptionError for a given option that would have no effect; a default without effect gives way silently.
        """
        sampling_asked = [name for name in _SAMPLING if _is_given(self, name)]
        if self.do_sample is None:
            sample = any(name != "temperature" or self.temperature for name in sampling_asked)
            if self.temperature == 0:
                sample = False
            elif not sampling_asked:
                sample = bool(defaults.do_sample) and defaults.temperature != 0
        else:
            sample = self.do_sample
        if sample and self.temperature == 0:
            raise OptionError("temperature = 0 is greedy and do_sample = True draws: give one of them")
        without_effect = [name for name in sampling_asked if not (name == "temperature" and self.temperature == 0)]
        if not sample and without_effect:
            why = "temperature = 0" if self.temperature == 0 else "do_sample = False"
            given = ", ".join(f"{name} = {getattr(self, name)!r}" for name in without_effect)
            raise OptionError(f"{given} would have no effect with {why}: leave it out, or let the call sample")
        merged = {
            name: getattr(self, name) if _is_given(self, name) else getattr(defaults, name) for name in _FROM_BUNDLE
        }
        temperature = 1.0 if not merged["temperature"] else float(merged["temperature"])
        resolved = ResolvedOptions(
            do_sample=sample,
            temperature=temperature,
            top_k=DEFAULT_TOP_K if merged["top_k"] is None else merged["top_k"],
            top_p=1.0 if merged["top_p"] is None else float(merged["top_p"]),
            repetition_penalty=1.0 if merged["repetition_penalty"] is None else float(merged["repetition_penalty"]),
            max_new_tokens=self.max_new_tokens,
            usual_new_tokens=defaults.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            least_new_tokens=self.min_new_tokens or 1,
            min_new_tokens=merged["min_new_tokens"] or 0,
            stop=tuple(self.stop or ()),
            eos_token_ids=frozenset(merged["eos_token_id"] or ()),
            seed=self.seed,  # type: ignore[arg-type]  # a tuple by now, unless an integer or None
        )
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens = {self.min_new_tokens} (accepted: at most max_new_tokens = {self.max_new_tokens})"
            )
        if self.min_new_tokens and not resolved.eos_token_ids:
            raise OptionError(
                f"min_new_tokens = {self.min_new_tokens} would have no effect: no eos_token_id ends the text early"
            )
        return resolved


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

    def new_tokens_for(self, prompt_tokens: int, n_positions: int) -> int:
        """Return how many tokens to generate at most after a prompt of `prompt_tokens`."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
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


def read_generation_config(values: Mapping[str, Any], fallback_eos: Iterable[int]) -> GenerationOptions:
    """Return the defaults that a bundle's generation_config.json states; other keys with a bearing are logged.

    Raises OptionError for a value that is not accepted.
    """
    ignored = [
        f"{key} = {value!r}"
        for key, value in values.items()
        if value is not None and key not in (*_FROM_BUNDLE, *_WITHOUT_BEARING) and _NEUTRAL.get(key) != value
    ]
    if ignored:
        _logger.warning("generation_config.json has keys that this version does not use: %s", ", ".join(ignored))
    known = {name: values[name] for name in _FROM_BUNDLE if values.get(name) is not None}
    return GenerationOptions(**({"eos_token_id": fallback_eos} | known))


def _is_given(options: GenerationOptions, name: str) -> bool:
    return getattr(options, name) is not None


def _check(name: str, value: object, good: bool, accepted: str) -> None:
    if value is not None and not good:
        raise OptionError(f"{name} = {value!r} (accepted: {accepted})")


def _as_float(value: object) -> float | None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
