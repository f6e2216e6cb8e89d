"""The options of a generation as flags of the command line, and how flags become keywords of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ortgpt.bundle.checked_json import parse_json
from ortgpt.cli.prompt_lines import FORMATS
from ortgpt.cli.streams import read_argument, read_text
from ortgpt.errors import Mention, OptionError, shown
from ortgpt.loading import PREFILLS
from ortgpt.options.generation_options import OPTIONS
from ortgpt.options.option import Flag, Option

Command = TypeVar("Command", bound=Callable[..., Any])

_GRAMMARS = ("grammar_regex", "grammar_json_schema", "grammar_choice")


def generation_options(command: Command) -> Command:
    """Add the flags of all options of a generation."""
    return _add_flags(command, lambda flag: True)


def chat_options(command: Command) -> Command:
    """Add the flags of the options that a turn of `ortgpt chat` can have."""
    return _add_flags(command, lambda flag: flag.in_chat)


def some_options(names: Iterable[str]) -> Callable[[Command], Command]:
    """Return what adds the flags of some options of a generation."""
    options = {name: OPTIONS[name] for name in names}
    return lambda command: _add_flags(command, lambda flag: True, options)


def device_options(command: Command) -> Command:
    """Add --device and --threads."""
    threads = click.option(
        "--threads", type=int, metavar="N", help="CPU threads. [default: the CPUs this process may use]"
    )
    device = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
    return device(threads(command))


def verify_option(command: Command) -> Command:
    """Add --verify."""
    return click.option(
        "--verify",
        type=click.Choice(["sha256", "size"]),
        default="sha256",
        show_default=True,
        help="What of the bundle's files to compare with its manifest.",
    )(command)


def prefill_option(command: Command) -> Command:
    """Add --prefill."""
    return click.option(
        "--prefill",
        type=click.Choice(PREFILLS),
        default="auto",
        show_default=True,
        help="How prompts of 32 or more tokens are computed: fast, by the bundle's graph for prompts; exact, as steps "
        "are; auto, fast if the bundle has one.",
    )(command)


def input_options(noun: str, help: str) -> Callable[[Command], Command]:
    """Return what adds --input, which `help` describes, and --input-format; `noun` says what a line of text is."""

    def add(command: Command) -> Command:
        form = click.option(
            "--input-format",
            type=click.Choice(FORMATS),
            help=f"With --input: JSON in each line, or plain text, of which each line is a {noun}. [default: text for "
            "*.txt, else jsonl]",
        )
        file = click.option("--input", "input_file", type=click.Path(path_type=Path), metavar="FILE", help=help)
        return file(form(command))

    return add


def json_option(command: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")(command)


def _add_flags(command: Command, wanted: Callable[[Flag], bool], options: Mapping[str, Option] = OPTIONS) -> Command:
    flags = [(name, option, flag) for name, option in options.items() for flag in option.flags if wanted(flag)]
    for name, option, flag in reversed(flags):
        command = _click_option(name, option, flag)(command)
    return command


def _click_option(name: str, option: Option, flag: Flag) -> Callable[[Command], Command]:
    text = flag.help or option.help
    if flag.type is bool:
        return click.option(flag.name, _parameter(name, flag), is_flag=True, help=text)
    if option.default_text and option.default is not None and not flag.help and not flag.repeatable:
        text = f"{text} [default: {option.default_text}]"
    text += " Repeatable." if flag.repeatable else ""
    return click.option(
        flag.name, _parameter(name, flag), type=flag.type, multiple=flag.repeatable, metavar=flag.metavar, help=text
    )


def _parameter(name: str, flag: Flag) -> str:
    """Return the name that click gives to a flag's value: the option's, unless several flags set it."""
    several = len(OPTIONS[name].flags) > 1 or name in ("do_sample", "assistant_model")
    return flag.name.removeprefix("--").replace("-", "_") if several else name


def flag_mention(name: str, value: object) -> Mention:
    """Mention an option of a call by its flag: --top-k = 5 for top_k."""
    if name == "do_sample":
        return _Greedy(name, value) if value is False else Mention(name, value)
    if name in ("device", "threads", "stride", "kind", "delimiter", "limit"):
        return Mention(f"--{name}", value)
    flags = OPTIONS[name].flags if name in OPTIONS else ()
    return Mention("--grammar-..." if len(flags) > 1 else flags[0].name if flags else name, value)


class _Greedy(Mention):
    def __str__(self) -> str:
        return "--greedy"


def read_options(values: dict[str, Any]) -> dict[str, Any]:
    """Turn what click parsed into keywords of a call, without flags that are absent; --assistant stays a path.

    Raises OptionError.
    """
    options = {
        name: _read_texts(name, value)
        for name, value in values.items()
        if value is not None and value is not False and value != ()
    }
    if options.pop("greedy", False):
        options["do_sample"] = False
    if "early_stopping" in options:
        how = options["early_stopping"]
        options["early_stopping"] = {"true": True, "false": False}.get(how, how)
    if "logit_bias" in options:
        pairs = [_read_bias(text) for text in options["logit_bias"]]
        options["logit_bias"] = dict(pairs)
        if len(options["logit_bias"]) < len(pairs):
            raise OptionError("--logit-bias names a token id twice: give one number for each")
    grammars = [name for name in _GRAMMARS if name in options]
    if len(grammars) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in grammars)
        raise OptionError(f"{names} exclude each other: give one of them")
    for name in grammars:
        value = options.pop(name)
        options["grammar"] = _read_schema(value) if name == "grammar_json_schema" else value
    return options


def _read_texts(name: str, value: Any) -> Any:
    """Return the value of a flag, its texts without a byte-order mark. Raises OptionError for one that is not UTF-8."""
    if isinstance(value, str):
        return read_argument(f"--{name.replace('_', '-')}", value)
    return tuple(_read_texts(name, each) for each in value) if isinstance(value, tuple) else value


def _read_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise OptionError(f"--logit-bias {shown(text)} (accepted: ID=NUMBER, as 198=-5)") from None


def _read_schema(text: str) -> dict[str, Any]:
    accepted = "accepted: a JSON object, or a file with one"
    if not text.lstrip().startswith("{"):
        if not Path(text).is_file():
            raise OptionError(f"--grammar-json-schema {shown(text)} is not a file ({accepted})")
        text = read_text(text)
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise OptionError(f"--grammar-json-schema is not JSON: {error} ({accepted})") from None
    if not isinstance(schema, dict):
        raise OptionError(f"--grammar-json-schema holds a {type(schema).__name__} ({accepted})")
    return schema
