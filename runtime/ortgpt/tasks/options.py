"""The options of generation that a task can have, and how those of a call and of a form become one set."""

from __future__ import annotations

from dataclasses import replace

from ortgpt.errors import OptionError
from ortgpt.options.exclusions import gives_way
from ortgpt.options.generation_options import OPTIONS, GenerationOptions

# They give several answers, or more than an answer.
_NOT_IN_TASKS = ("num_return_sequences", "logprobs", "echo")
_OF_ASSISTANT = ("assistant_model", "num_assistant_tokens")
_OF_CALL = ("timeout_s", "seed", "logit_bias")  # a form says nothing of them, nor of the ids of a model
_OF_PROMPT = ("context_overflow", "keep_tokens")

TASK_OPTIONS = tuple(name for name in OPTIONS if name not in _NOT_IN_TASKS)
"""What the call of a task whose answer is generated can have."""
COMMAND_OPTIONS = tuple(name for name in TASK_OPTIONS if OPTIONS[name].flags and name not in _OF_ASSISTANT)
"""What `ortgpt task` has flags for."""
FORM_OPTIONS = tuple(name for name in COMMAND_OPTIONS if name not in _OF_CALL)
"""What its form can set."""
SEARCH_OPTIONS = ("max_new_tokens", *_OF_PROMPT)
"""What a task whose answer is a word that is searched can have."""
RANKING_OPTIONS = _OF_PROMPT
"""What a task whose answer is a label can have."""


def check_options(options: GenerationOptions, accepted: tuple[str, ...], why: str) -> None:
    """Raise OptionError for an option that is set and not `accepted`; `why` says what has none such."""
    for name in OPTIONS:
        if getattr(options, name) is not None and name not in accepted:
            names = ", ".join(f"{{{each}.name}}" for each in accepted)
            others = "" if accepted == TASK_OPTIONS else f" (accepted: {names})"
            raise OptionError(
                f"{{{name}}} would have no effect: {why}{others}",
                {each: getattr(options, each) for each in (name, *accepted)},
            )
    if options.context_overflow == "slide" and "do_sample" not in accepted:
        raise OptionError.bad_value("context_overflow", "slide", "error, truncate, where nothing is generated")


def merged(form: GenerationOptions, call: GenerationOptions) -> GenerationOptions:
    """Return the options of a call, with those of the form where the call sets none.

    An option of the form gives way where the call sets another that it has no effect beside, or that it excludes.
    """
    chosen = {name: getattr(call, name) for name in OPTIONS}
    own = {name: getattr(form, name) for name, value in chosen.items() if value is None}
    own = {name: value for name, value in own.items() if value is not None and not gives_way(name, value, chosen)}
    return replace(call, **own) if own else call
