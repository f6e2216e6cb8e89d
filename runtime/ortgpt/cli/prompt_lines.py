"""The lines of a file of prompts: what each asks for, in JSON, as in OpenAI's batch files, or in plain text.

Knows no model: whether the options of a line can be had, prompt_files.py finds out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import parse_json
from ortgpt.cli.streams import read_text
from ortgpt.errors import OptionError, OrtGptError, PromptError, shown
from ortgpt.options.exclusions import SAMPLING
from ortgpt.options.generation_options import OPTIONS
from ortgpt.options.names import is_like_an_option, option_named
from ortgpt.results import Completion

FORMATS = ("jsonl", "text")
# The names in a record that are not the line's own.
_RECORD_NAMES = frozenset({"line", "prompt", "key", "error", *(each.name for each in fields(Completion))})
_PLAIN = "with --input-format text, each line is a prompt as it is"
_IDS = ("id", "custom_id")
_COMPLETIONS = "/v1/completions"
_NO_CHAT = "(accepted: a text to continue, as for /v1/completions; the model has no chat)"


@dataclass(frozen=True)
class PromptLine:
    """What one line asks for; where it asks for nothing that can be had, `error` says why."""

    prompt: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The line's own options, which win over those of the command line."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What comes back in the line's records: "id" for example."""
    echo: bool = False
    """Whether the text of a record begins with the prompt."""
    error: OrtGptError | None = None


class PromptFile:
    """The lines of a file that are not blank. The text is held, not what is made from it."""

    def __init__(self, path: Path, format: str | None, *, refuses_text: bool = True) -> None:
        """Read a file whose lines are JSON ("jsonl") or prompts ("text"); None decides by its name.

        Raises OptionError for a file of the other format, unless `refuses_text` is false and the other one is text;
        OSError.
        """
        self.path = path
        is_txt = path.suffix.lower() == ".txt"
        self.format = format or ("text" if is_txt else "jsonl")
        lines = (line.removesuffix("\r") for line in read_text(str(path)).split("\n"))
        self.lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        """The number and the text of each line."""
        if self.format == "text" and format is None:
            self._refuse_json()
        elif self.format == "jsonl" and refuses_text:
            self._refuse_text()

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, place: int) -> PromptLine:
        """Return what a line asks for, by its place among `lines`."""
        _, line = self.lines[place]
        return PromptLine(line) if self.format == "text" else read_json_line(line)

    def _refuse_json(self) -> None:
        for number, line in self.lines:
            if _holds_prompt(line):
                raise OptionError(
                    f"{self.path} line {number} is JSON, but a file of that name is read as plain text; give "
                    "--input-format jsonl, or --input-format text to continue such lines as they are"
                )

    def _refuse_text(self) -> None:
        if self.lines and not any(_holds_prompt(line) for _, line in self.lines):
            number, line = self.lines[0]
            error = read_json_line(line).error
            raise PromptError(f"{self.path} line {number}: {error}; no other line holds a prompt either")


def read_json_line(line: str) -> PromptLine:
    """Return what a line of JSON asks for."""
    try:
        value = parse_json(line, half_characters=True)  # of a prompt, it becomes U+FFFD
    except ValueError as error:
        value = _read_leniently(line)
        if not isinstance(value, dict):
            return PromptLine(error=PromptError(f"not JSON: {error} ({_PLAIN})"))
        own = {name: each for name, each in value.items() if name in _IDS}
        return PromptLine(value.get("prompt"), {}, own, error=PromptError(f"not strict JSON: {error}"))
    if not isinstance(value, dict):
        return _checked(PromptLine(value))
    if "body" in value and "prompt" not in value:
        return _checked(_batch_line(value))
    options = {name: each for name, each in value.items() if _is_setting(name)}
    own = {name: each for name, each in value.items() if name not in options and name != "prompt"}
    if "prompt" in value:
        return _checked(PromptLine(value["prompt"], options, own))
    accepted = (
        _NO_CHAT if "messages" in value else '(accepted: a text, a list of token ids, or an object with "prompt")'
    )
    return _checked(PromptLine(None, {}, own, error=PromptError(f'no "prompt" {accepted}')))


def _read_leniently(line: str) -> Any:
    """Return what Python's own reader makes of a line, which takes NaN and a key that comes twice; None if nothing."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _batch_line(value: Mapping[str, Any]) -> PromptLine:
    """Return what a line of a batch file asks for, as OpenAI defines it: {"custom_id", "method", "url", "body"}."""
    own = {name: each for name, each in value.items() if name not in ("method", "url", "body")}
    body, url, method = value["body"], value.get("url", _COMPLETIONS), value.get("method", "POST")
    if not isinstance(body, dict):
        return PromptLine(None, {}, own, error=PromptError(f"body = {shown(body)} (accepted: an object)"))
    prompt = body.get("prompt")
    if url != _COMPLETIONS or "messages" in body:
        what = f"url = {shown(url)}" if url != _COMPLETIONS else 'body has "messages"'
        return PromptLine(prompt, {}, own, error=PromptError(f"{what} {_NO_CHAT}"))
    if method != "POST":
        return PromptLine(prompt, {}, own, error=PromptError(f"method = {shown(method)} (accepted: POST)"))
    if "prompt" not in body:
        return PromptLine(None, {}, own, error=PromptError('no "prompt" in body'))
    options: dict[str, Any] = {}
    for name, each in body.items():
        if name in ("prompt", "model", "user") or each is None or _is_idle(name, each, body):
            continue
        option = option_named(name, OPTIONS) or name
        if option in options:
            error = OptionError(f"{name} and another name of {option} are both in body: give one of them")
            return PromptLine(prompt, {}, own, error=error)
        options[option] = each
    if options.get("temperature") == 0:  # greedy: there, what else says how to sample has no effect
        options = {name: each for name, each in options.items() if name not in SAMPLING or name == "temperature"}
    echo = options.get("echo") is True
    if isinstance(options.get("echo"), bool) and "logprobs" not in options:
        del options["echo"]
    return PromptLine(prompt, options, own, echo)


@functools.lru_cache(1024)  # lines repeat their names
def _is_setting(name: str) -> bool:
    return is_like_an_option(name, OPTIONS)


def _is_idle(name: str, value: Any, body: Mapping[str, Any]) -> bool:
    """Tell whether a name of OpenAI's has the value that changes nothing there."""
    idle = {"stream": False, "suffix": "", "best_of": body.get("n") or 1, "top_p": 1}
    return name in idle and value == idle[name]


def _checked(line: PromptLine) -> PromptLine:
    """Return a line with the keys of logit_bias as integers, and with an error if prompt or own keys cannot be."""
    taken = sorted(_RECORD_NAMES & line.own.keys())
    own = {name: each for name, each in line.own.items() if name not in taken}
    error = line.error
    if error is None and not isinstance(line.prompt, (str, list)):
        error = PromptError(f"prompt = {shown(line.prompt)} (accepted: a text, or a list of token ids)")
    if error is None and taken:
        error = PromptError(f'"{taken[0]}" is a name that the record itself has; rename it, or put it into "metadata"')
    options, bias = line.options, line.options.get("logit_bias")
    if isinstance(bias, dict):  # JSON has no other keys than texts
        by_id = {int(key) if key.isdecimal() and len(key) < 20 else key: each for key, each in bias.items()}
        options = {**options, "logit_bias": by_id}
    return PromptLine(line.prompt, options, own, line.echo, error)


def _holds_prompt(line: str) -> bool:
    """Tell whether a line is a JSON text, list or object."""
    if line.lstrip()[0] not in '"[{':
        return False
    try:
        parse_json(line, half_characters=True)
    except ValueError:
        return False
    return True
