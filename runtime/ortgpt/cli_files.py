"""A file of prompts in, a file of continuations out: in batches, in order, and gone on with after an interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ortgpt.completion import Completion
from ortgpt.errors import OptionError, OrtGptError, PromptError
from ortgpt.generator import Generator
from ortgpt.options import GenerationOptions

_CHUNK = 64  # prompts that are computed and written at once: what an interruption loses


def read_text(path: str) -> str:
    """Return all of a UTF-8 file, or of standard input for "-", its line ends as they are."""
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise click.ClickException(f"{name} is not UTF-8 text: {error}; convert it first") from error


def run_file(generator: Generator, source: Path, target: Path, options: Mapping[str, Any]) -> None:
    """Continue each prompt of `source`, a JSON value a line, and append a JSON object a continuation to `target`.

    A line of `source` is a text, a list of token ids, or an object with "prompt" and options of its own, which win. An
    object of `target` has the prompt, "index" (the line of the prompt, from 0) and what --json writes. Whole prompts
    that `target` has already are passed over. Raises OptionError or PromptError naming the line at fault.
    """
    requests = [
        _read_line(line, f"{source} line {number}", options)
        for number, line in enumerate(read_text(str(source)).splitlines(), 1)
        if line.strip()
    ]
    done = _resume(target, requests)
    if done:
        click.echo(f"{target} has {done} of {len(requests)} prompts already", err=True)
    with target.open("a", encoding="utf-8") as out, _bar(len(requests), done) as bar:
        for begin in range(done, len(requests), _CHUNK):
            chunk = requests[begin : begin + _CHUNK]
            try:
                found = generator.generate_batch([each.prompt for each in chunk], [each.options for each in chunk])
            except OrtGptError as error:
                raise type(error)(f"{source}, prompts {begin} to {begin + len(chunk) - 1}: {error}") from error
            for index, request in enumerate(chunk, begin):
                for _ in range(request.options.num_return_sequences or 1):
                    record = {"index": index, "prompt": request.prompt, **completion_values(found.pop(0))}
                    out.write(json.dumps(record) + "\n")
            out.flush()
            os.fsync(out.fileno())
            bar.update(len(chunk))


@dataclasses.dataclass(frozen=True)
class _Request:
    prompt: Any
    options: GenerationOptions


def _bar(total: int, done: int) -> Any:
    bar: Any = click.progressbar(length=total, label="prompts", file=sys.stderr, show_pos=True)
    bar.update(done)
    return bar


def _read_line(line: str, where: str, options: Mapping[str, Any]) -> _Request:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is no JSON: {error}") from None
    own: dict[str, Any] = {}
    if isinstance(value, dict):
        own = {name: each for name, each in value.items() if name != "prompt"}
        if "prompt" not in value:
            raise PromptError(f'{where} has no "prompt" (accepted: a text, a list of token ids, or an object with one)')
        value = value["prompt"]
    if not isinstance(value, (str, list)):
        raise PromptError(f"{where}: prompt = {value!r} (accepted: a text, or a list of token ids)")
    try:
        return _Request(value, GenerationOptions.make(None, {**options, **own}))
    except OrtGptError as error:
        raise type(error)(f"{where}: {error}") from None


def _resume(target: Path, requests: Sequence[_Request]) -> int:
    """Return how many prompts `target` has whole; cut off what comes behind them, which an interruption left."""
    if not target.exists():
        return 0
    data = target.read_bytes()
    done, kept, count, size = 0, 0, 0, 0
    for line in data.splitlines(keepends=True):
        size += len(line)
        try:
            record = json.loads(line)
            index, prompt = record["index"], record["prompt"]
        except (ValueError, TypeError, KeyError):
            if line.endswith(b"\n"):
                raise OptionError(
                    f"{target} has a line that is none of this command's; name another --output"
                ) from None
            break
        if index != done or done >= len(requests) or prompt != requests[done].prompt:
            raise OptionError(f"{target} was written from other prompts; name another --output") from None
        count += 1
        if count == (requests[done].options.num_return_sequences or 1):
            done, kept, count = done + 1, size, 0
    if kept < len(data):
        with target.open("r+b") as out:
            out.truncate(kept)
    return done


def completion_values(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON has it, without what was not asked for."""
    optional = ("logprobs", "prompt_logprobs", "score")
    values = dataclasses.asdict(completion)
    return {name: value for name, value in values.items() if value is not None or name not in optional}
