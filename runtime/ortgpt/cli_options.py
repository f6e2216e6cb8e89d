"""The options of a generation on the command line, and how they become those of a call. Knows no command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ortgpt.cli_io import read_text
from ortgpt.errors import OptionError
from ortgpt.messages import shown
from ortgpt.options import GenerationOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--max-new-tokens", type=int, metavar="N", help="At most N tokens. [default: 128, or what fits]"),
    click.option("--min-new-tokens", type=int, metavar="N", help="No end-of-text before N tokens."),
    click.option("--greedy", is_flag=True, help="Take the most likely token at each step."),
    click.option("--temperature", type=float, metavar="F", help="Divides the logits before drawing; 0: greedy."),
    click.option("--top-k", type=int, metavar="N", help="Draw among the N most likely; 0: all. [default: 50]"),
    click.option("--top-p", type=float, metavar="F", help="Draw among the most likely that together reach F."),
    click.option("--min-p", type=float, metavar="F", help="Draw among those at least F times as likely as the first."),
    click.option("--typical-p", type=float, metavar="F", help="Draw among the most typical that together reach F."),
    click.option("--seed", type=int, metavar="N", help="Draw reproducibly."),
    click.option("--repetition-penalty", type=float, metavar="F", help="Above 1: what occurred becomes less likely."),
    click.option("--presence-penalty", type=float, metavar="F", help="Subtracted where the continuation has a token."),
    click.option("--frequency-penalty", type=float, metavar="F", help="Subtracted for each time that it has it."),
    click.option("--no-repeat-ngram-size", type=int, metavar="N", help="No N tokens occur twice in this order."),
    click.option("--bad-words", multiple=True, metavar="TEXT", help="Never write TEXT, as these tokens; repeatable."),
    click.option("--suppress-tokens", type=int, multiple=True, metavar="ID", help="Never pick ID; repeatable."),
    click.option("--logit-bias", multiple=True, metavar="ID=F", help="Add F to a token's logit; repeatable."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the continuation at TEXT; repeatable."),
    click.option("--eos-token-id", type=int, multiple=True, metavar="ID", help="End it at token ID; repeatable."),
    click.option("--timeout", "timeout_s", type=float, metavar="S", help="End it after S seconds."),
    click.option("--prompt-lookup", "prompt_lookup_num_tokens", type=int, metavar="N",
                 help="Guess up to N tokens from the text so far; faster where it repeats."),
    click.option("--assistant", type=click.Path(path_type=Path), metavar="BUNDLE", help="A smaller model, to guess."),
    click.option("--assistant-tokens", "num_assistant_tokens", type=int, metavar="N", help="What it guesses at first."),
    click.option("--grammar-regex", metavar="REGEX", help="The text must match REGEX."),
    click.option("--grammar-json-schema", metavar="FILE|JSON", help="The text must be JSON of this schema."),
    click.option("--grammar-choice", multiple=True, metavar="TEXT", help="The text must be one of these; repeatable."),
    click.option("--deterministic", is_flag=True, help="Each row alone, so that it is the same to the bit."),
)  # fmt: skip
_CONTEXT = (
    click.option("--context-overflow", metavar="HOW", help="Beyond the context: error, truncate or slide."),
    click.option("--keep-tokens", type=int, metavar="N", help="The prompt's first tokens that they keep."),
    click.option("--slide-tokens", type=int, metavar="N", help="What sliding lets go at once."),
)
_FLAGS = {
    "timeout_s": "--timeout",
    "prompt_lookup_num_tokens": "--prompt-lookup",
    "assistant_model": "--assistant",
    "num_assistant_tokens": "--assistant-tokens",
    "grammar": "--grammar-...",
}
_ONLY_IN_PYTHON = {"cancel", "logits_processor"}
_NAMES = re.compile(
    "(?<![-\\w])(" + "|".join(GenerationOptions.__dataclass_fields__.keys() - _ONLY_IN_PYTHON) + ")(?= =|,|:)"
)


def generation_options(command: Command) -> Command:
    """Give a command the options of a generation."""
    for option in reversed((*_OPTIONS, *_CONTEXT)):
        command = option(command)
    return command


def turn_options(command: Command) -> Command:
    """Give a command the options of a turn of a conversation, whose text has to fit the context."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def with_flags(message: str) -> str:
    """Return a message with the names that options have on the command line."""
    message = message.replace("do_sample = False", "--greedy")
    return _NAMES.sub(lambda found: _FLAGS.get(found[0], f"--{found[0].replace('_', '-')}"), message)


def read_options(values: dict[str, Any]) -> dict[str, Any]:
    """Turn what click parsed into keywords of a call, leaving out what was not given; --assistant is left as a path."""
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != ()}
    if given.pop("greedy", False):
        given["do_sample"] = False
    if "logit_bias" in given:
        pairs = [_read_bias(text) for text in given["logit_bias"]]
        given["logit_bias"] = dict(pairs)
        if len(given["logit_bias"]) < len(pairs):
            raise OptionError("--logit-bias names a token id twice: give one number for each")
    grammars = [name for name in ("grammar_regex", "grammar_json_schema", "grammar_choice") if name in given]
    if len(grammars) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in grammars)
        raise OptionError(f"{names} exclude each other: give one of them")
    for name in grammars:
        value = given.pop(name)
        given["grammar"] = _read_schema(value) if name == "grammar_json_schema" else value
    return given


def _read_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise OptionError(f"--logit-bias {text!r} (accepted: ID=NUMBER, as 198=-5)") from None


def _read_schema(text: str) -> dict[str, Any]:
    accepted = "accepted: a JSON object, or a file with one"
    if not text.lstrip().startswith("{"):
        if not Path(text).is_file():
            raise OptionError(f"--grammar-json-schema {shown(text)} is no file ({accepted})")
        text = read_text(text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--grammar-json-schema is no JSON: {error} ({accepted})") from None
    if not isinstance(schema, dict):
        raise OptionError(f"--grammar-json-schema holds a {type(schema).__name__} ({accepted})")
    return schema
