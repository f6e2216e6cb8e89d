"""Which options of a call exclude each other, and which have no effect alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

from ortgpt.errors import OptionError
from ortgpt.options.option import Option

Options = Mapping[str, Any]  # the values of a call by name, None for those that are unset

OVERFLOWS = ("error", "truncate", "slide")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
# What has an effect only beside another option: name, the other's name, what the other has to be, in words.
_NEEDS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("length_penalty", "num_beams", lambda beams: (beams or 1) > 1, "{num_beams.name} above 1"),
    ("early_stopping", "num_beams", lambda beams: (beams or 1) > 1, "{num_beams.name} above 1"),
    ("echo", "logprobs", lambda count: count is not None, "{logprobs.name}"),
    ("keep_tokens", "context_overflow", lambda how: how in OVERFLOWS[1:],
     '{context_overflow.name} "truncate" or "slide"'),
    ("slide_tokens", "context_overflow", lambda how: how == "slide", '{context_overflow.name} "slide"'),
    ("num_assistant_tokens", "assistant_model", lambda model: model is not None, "an {assistant_model.name}"),
)  # fmt: skip
_OF_BEAMS = ("num_beams", "length_penalty", "early_stopping")
# What num_beams above 1 excludes, beside the options of sampling.
_NOT_WITH_BEAMS = (
    "logprobs", "prompt_lookup_num_tokens", "assistant_model", "grammar", "context_overflow", "deterministic"
)  # fmt: skip


def check_together(options: Options, declared: Mapping[str, Option], sample: bool) -> None:
    """Raise OptionError for options that exclude each other, and for those without effect."""
    _check_sampling(options, sample)
    for name, other, is_met, wanted in _NEEDS:
        if options[name] not in (None, declared[name].default) and not is_met(options[other]):
            raise _error(options, f"{{{name}}} would have no effect without {wanted}")
    if options["min_new_tokens"] and options["min_new_tokens"] > (options["max_new_tokens"] or math.inf):
        raise _error(options, "{min_new_tokens} (accepted: at most {max_new_tokens})")
    if options["grammar"] is not None and options["min_new_tokens"]:
        raise _error(options, "{min_new_tokens} cannot be combined with a grammar, which says when a text ends")
    drafting = _given(options, "prompt_lookup_num_tokens", "assistant_model")
    if len(drafting) > 1:
        raise _error(
            options, "{prompt_lookup_num_tokens.name} and {assistant_model.name} both propose drafts: give one of them"
        )
    if options["deterministic"] and drafting:
        raise _error(options, f"{_fields(drafting)} cannot be combined with {{deterministic}}: it takes no drafts")
    _check_sequences(options, sample)


def gives_way(name: str, value: Any, call: Options) -> bool:
    """Tell whether an option, which a call leaves unset, has no effect beside what the call sets, or excludes that."""
    if any(
        option == name and call[other] is not None and not is_met(call[other]) for option, other, is_met, _ in _NEEDS
    ):
        return True
    if (call["num_beams"] or 1) > 1:
        return name in (*SAMPLING, "do_sample", *_NOT_WITH_BEAMS)
    if (call["do_sample"] is False or call["temperature"] == 0) and name in (*SAMPLING, "do_sample"):
        return True
    drafting = ("prompt_lookup_num_tokens", "assistant_model")
    if name in drafting and _given(call, *drafting, "deterministic"):
        return True
    draws = bool(call["do_sample"] or _given_sampling(call))
    if draws and {"do_sample": False, "temperature": 0}.get(name) == value:
        return True
    return name in _OF_BEAMS and (draws or bool(_given(call, *_NOT_WITH_BEAMS)))


def _check_sampling(options: Options, sample: bool) -> None:
    if options["do_sample"] and options["temperature"] == 0:
        raise _error(options, "{temperature} is greedy and {do_sample} draws: give one of them")
    if sample or (options["num_beams"] or 1) > 1:
        return
    idle = _given_sampling(options)
    if idle:
        why = "{temperature}" if options["temperature"] == 0 else "{do_sample}"
        raise _error(options, f"{_fields(idle)} would have no effect with {why}: remove it, or turn sampling on")


def _check_sequences(options: Options, sample: bool) -> None:
    beams, sequences = options["num_beams"] or 1, options["num_return_sequences"] or 1
    if beams > 1:
        excluded = [*_given_sampling(options), *_given(options, *_NOT_WITH_BEAMS)]
        excluded += ["do_sample"] if options["do_sample"] else []
        if excluded:
            raise _error(options, f"{_fields(excluded)} cannot be combined with {{num_beams}}")
        if sequences > beams:
            raise _error(options, "{num_return_sequences} (accepted: at most {num_beams})")
    elif not sample and sequences > 1:
        raise _error(
            options,
            "{num_return_sequences} would be identical texts: turn sampling on, or give {num_beams.name}",
        )


def _given(options: Options, *names: str) -> list[str]:
    return [name for name in names if options[name] is not None]


def _given_sampling(options: Options) -> list[str]:
    return [name for name in _given(options, *SAMPLING) if (name, options[name]) != ("temperature", 0)]


def _fields(names: Sequence[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names)


def _error(options: Options, template: str) -> OptionError:
    """Return the error of a template, with the values of the options that it mentions."""
    mentioned = {name.partition(".")[0] for _, name, _, _ in Formatter().parse(template) if name}
    return OptionError(template, {name: options[name] for name in mentioned})
