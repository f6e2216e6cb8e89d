"""A file of prompts in, a file of continuations out: in batches, in order, and gone on with after an interruption."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from ortgpt.cli_io import completion_values, drop_output, read_text
from ortgpt.contract import File
from ortgpt.errors import OptionError, OrtGptError, PromptError
from ortgpt.files import naming
from ortgpt.generator import Generator
from ortgpt.messages import shown
from ortgpt.options import GenerationOptions

_CHUNK = 32  # prompts that are computed and written at once: what an interruption loses


@dataclasses.dataclass(frozen=True)
class _Line:
    """One line of the input: its number, its prompt, and the options that hold for it."""

    number: int
    prompt: Any
    options: GenerationOptions
    key: str  # of bundle, prompt and options: tells a record of this run from another's

    @property
    def count(self) -> int:
        return self.options.num_return_sequences or 1


def run_file(generator: Generator, source: Path, target: Path | None, options: Mapping[str, Any]) -> None:
    """Continue each prompt of `source`, a JSON value a line, and write a JSON object a continuation.

    A line of `source` is a text, a list of token ids, or an object with "prompt" and options of its own, which win. An
    object that is written has the "line" of the prompt, the prompt, and what --json writes; it is appended to `target`,
    or written to standard output. Prompts that `target` has already are passed over. Every line is checked before any
    work; raises OptionError, PromptError or ContextLengthError naming the line at fault.
    """
    lines = list(_read_lines(generator, source, options))
    with _opened(target) as out:
        done = 0 if target is None else _resume(target, lines)
        if done:
            click.echo(f"{target} has {done:,} of {len(lines):,} prompts already", err=True)
        _write(generator, lines, done, source, out)
    if target is not None:
        click.echo(f"{target} has {len(lines):,} of {len(lines):,} prompts", err=True)


def _write(generator: Generator, lines: Sequence[_Line], done: int, source: Path, out: BinaryIO) -> None:
    with _bar(len(lines), done) as bar:
        for begin in range(done, len(lines), _CHUNK):
            chunk = lines[begin : begin + _CHUNK]
            try:
                found = generator.generate_batch([each.prompt for each in chunk], [each.options for each in chunk])
            except OrtGptError as error:
                raise type(error)(f"{source} lines {chunk[0].number} to {chunk[-1].number}: {error}") from error
            records = iter(found)
            for line in chunk:
                for _ in range(line.count):
                    record = {"line": line.number, "prompt": line.prompt, "key": line.key}
                    out.write(json.dumps(record | completion_values(next(records))).encode() + b"\n")
            out.flush()
            if out is not sys.stdout.buffer:
                os.fsync(out.fileno())
            bar.update(len(chunk))


@contextlib.contextmanager
def _opened(target: Path | None) -> Iterator[BinaryIO]:
    if target is None:
        try:
            with naming("standard output"):
                yield sys.stdout.buffer
        except OSError:
            drop_output()
            raise
        return
    if os.path.lexists(target) and not target.is_file():
        raise OptionError(f"{target} is no regular file; name another --output")
    with naming(target), target.open("ab") as out:
        _lock(out, target)
        yield out


def _lock(out: BinaryIO, target: Path) -> None:
    """Keep a file for this run alone, as long as it is open. Raises OptionError where another has it."""
    with contextlib.suppress(ImportError, OSError):  # not on Windows, nor where the file system has no locks
        import fcntl

        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(f"{target} is being written by another run; name another --output") from None


def _bar(total: int, done: int) -> Any:
    hidden = not sys.stderr.isatty()
    bar: Any = click.progressbar(length=total, label="prompts", file=sys.stderr, show_pos=True, hidden=hidden)
    bar.update(done)
    return bar


def _read_lines(generator: Generator, source: Path, options: Mapping[str, Any]) -> Iterator[_Line]:
    text = read_text(str(source)).removeprefix("\ufeff")
    bundle = hashlib.sha256((generator.bundle.path / File.MANIFEST).read_bytes()).hexdigest()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt, own = _read_line(line)
            made = GenerationOptions.make(None, {**options, **own})
            generator.prepare([prompt], made)  # what is wrong is said before any work
        except OrtGptError as error:
            raise type(error)(f"{source} line {number}: {error}") from None
        shown = json.dumps([bundle, prompt, {**options, **own}], sort_keys=True, default=str)
        yield _Line(number, prompt, made, hashlib.sha256(shown.encode()).hexdigest()[:16])


def _read_line(line: str) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a line and its own options."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"no JSON: {error}") from None
    own: dict[str, Any] = {}
    if isinstance(value, dict):
        own = {name: each for name, each in value.items() if name != "prompt"}
        if "prompt" not in value:
            raise PromptError('no "prompt" (accepted: a text, a list of token ids, or an object with "prompt")')
        value = value["prompt"]
    if not isinstance(value, (str, list)):
        raise PromptError(f"prompt = {shown(value)} (accepted: a text, or a list of token ids)")
    if isinstance(own.get("logit_bias"), dict):  # JSON has no other keys than texts
        own["logit_bias"] = {
            int(key) if key.isdecimal() and len(key) < 20 else key: each for key, each in own["logit_bias"].items()
        }
    return value, own


def _resume(target: Path, lines: Sequence[_Line]) -> int:
    """Return how many prompts `target` has whole; cut off what comes behind them, which an interruption left."""
    data = target.read_bytes()
    done, kept, count, size = 0, 0, 0, 0
    for record in data.splitlines(keepends=True):
        size += len(record)
        if not record.endswith(b"\n"):
            begun = b'{"line": '
            if not record.startswith(begun[: len(record)]):
                raise OptionError(f"{target} ends in what is none of this command's; name another --output")
            break
        try:
            values = json.loads(record)
            same = done < len(lines) and (values["line"], values["key"]) == (lines[done].number, lines[done].key)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise OptionError(f"{target} has a line that is none of this command's; name another --output") from None
        if not same:
            raise OptionError(f"{target} was written from other prompts, options or weights; name another --output")
        count += 1
        if count == lines[done].count:
            done, kept, count = done + 1, size, 0
    if kept < len(data):
        with target.open("r+b") as out:
            out.truncate(kept)
    return done
