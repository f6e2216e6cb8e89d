"""A file of prompts in, a file of continuations out: in batches, in order, and continued after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import click

from ortgpt.bundle.checked_json import parse_json
from ortgpt.bundle.files import naming
from ortgpt.cli.streams import completion_values, drop_output, read_text
from ortgpt.contract import File
from ortgpt.errors import OptionError, OrtGptError, PromptError, shown
from ortgpt.model import LoadedModel
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.request import PreparedPrompt, Request, prepare_prompt

_CHUNK = 32  # prompts that are computed and written at once: what an interruption loses


@dataclass(frozen=True)
class _Line:
    """One line of the input: its number, its prompt as written, and the prompt with its options as prepared."""

    number: int
    prompt: Any
    prepared: PreparedPrompt
    key: str  # of bundle, prompt and options: tells a record of this run from another's

    @property
    def count(self) -> int:
        return self.prepared.options.num_return_sequences


def run_file(model: LoadedModel, source: Path, target: Path | None, options: Mapping[str, Any]) -> None:
    """Continue each prompt of `source`, a JSON value in each line, and write a JSON object for each continuation.

    A line of `source` is a text, a list of token ids, or an object with "prompt" and options of its own, which win. An
    object that is written has the "line" of the prompt, the prompt, and what --json writes; it is appended to `target`,
    or written to standard output. Prompts that `target` contains already are skipped. Every line is checked before any
    work; raises OptionError, PromptError or ContextLengthError that names the line.
    """
    lines = list(_read_lines(model, source, options))
    with _opened(target) as out:
        done = 0 if target is None else _resume(target, lines)
        if done:
            click.echo(f"{target} has {done:,} of {len(lines):,} prompts already", err=True)
        _write(model, lines, done, source, out)
    if target is not None:
        click.echo(f"{target} has {len(lines):,} of {len(lines):,} prompts", err=True)


def _write(model: LoadedModel, lines: Sequence[_Line], done: int, source: Path, out: BinaryIO) -> None:
    with _bar(len(lines), done) as bar:
        for begin in range(done, len(lines), _CHUNK):
            chunk = lines[begin : begin + _CHUNK]
            try:
                request = Request(model, [line.prepared for line in chunk])
                for _ in request.run():
                    pass
            except OrtGptError as error:
                raise error.at(f"{source} lines {chunk[0].number} to {chunk[-1].number}") from error
            sequences = iter(request.sequences)
            for line in chunk:
                for _ in range(line.count):
                    record = {"line": line.number, "prompt": line.prompt, "key": line.key}
                    out.write(json.dumps(record | completion_values(next(sequences).completion())).encode() + b"\n")
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
        raise OptionError(f"{target} is not a regular file; name another --output")
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


def _read_lines(model: LoadedModel, source: Path, options: Mapping[str, Any]) -> Iterator[_Line]:
    text = read_text(str(source)).removeprefix("\ufeff")
    bundle = hashlib.sha256((model.bundle.path / File.MANIFEST).read_bytes()).hexdigest()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt, own = _read_line(line)
            resolved = model.resolve(GenerationOptions.make(None, {**options, **own}))
            prepared = prepare_prompt(model, prompt, resolved, resolved.seeds_for(1)[0])
            Request(model, [prepared])  # says before any work what is wrong with it
        except OrtGptError as error:
            raise error.at(f"{source} line {number}") from None
        written = json.dumps([bundle, prompt, {**options, **own}], sort_keys=True, default=str)
        compact = replace(prepared, ids=array("i", prepared.ids))  # a file may have very many
        yield _Line(number, prompt, compact, hashlib.sha256(written.encode()).hexdigest()[:16])


def _read_line(line: str) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a line and its own options."""
    try:
        value = parse_json(line, half_characters=True)  # of a prompt, it becomes U+FFFD
    except ValueError as error:
        raise PromptError(f"not JSON: {error}") from None
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
    """Return how many prompts `target` has completely, and truncate the incomplete rest."""
    data = target.read_bytes()
    done, kept, count, size = 0, 0, 0, 0
    for record in data.splitlines(keepends=True):
        size += len(record)
        if not record.endswith(b"\n"):
            begun = b'{"line": '
            if not record.startswith(begun[: len(record)]):
                raise OptionError(f"{target} ends in text that this command did not write; name another --output")
            break
        try:
            values = json.loads(record)
            same = done < len(lines) and (values["line"], values["key"]) == (lines[done].number, lines[done].key)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise OptionError(f"{target} has a line that this command did not write; name another --output") from None
        if not same:
            raise OptionError(f"{target} was written from other prompts, options or weights; name another --output")
        count += 1
        if count == lines[done].count:
            done, kept, count = done + 1, size, 0
    if kept < len(data):
        with target.open("r+b") as out:
            out.truncate(kept)
    return done
