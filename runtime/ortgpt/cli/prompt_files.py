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

from ortgpt.bundle.files import naming
from ortgpt.bundle.writing import sync_folder
from ortgpt.cli.id_text import as_prompt
from ortgpt.cli.prompt_lines import PromptFile, PromptLine
from ortgpt.cli.streams import completion_values, drop_output, json_text
from ortgpt.contract import File
from ortgpt.errors import ClosedError, EngineError, OptionError, OrtGptError
from ortgpt.model import LoadedModel
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.request import PreparedPrompt, Request, prepare_prompt
from ortgpt.results import Completion

_CHUNK = 32  # prompts that are computed and written at once: what an interruption loses


@dataclass(frozen=True)
class _Line:
    """One line of the input, and its prompt with its options as prepared, or why there is none."""

    number: int
    asked: PromptLine
    key: str
    prepared: PreparedPrompt | OrtGptError


def run_file(
    model: LoadedModel, source: PromptFile, target: Path | None, options: Mapping[str, Any], *, strict: bool
) -> int:
    """Continue the prompt of each line, and write a JSON object for each continuation; return how many lines failed.

    An object has the "line" of the prompt, the line's own keys, the prompt, and what --json writes. A line that cannot
    be continued gets one object with an "error". They are appended to `target`, or written to standard output. Lines
    that `target` contains already are skipped. With `strict`, every line is checked before any work; raises
    OptionError, PromptError, ContextLengthError or NonFiniteLogitsError that names the first bad one.
    """
    return _Run(model, source, target, options, strict=strict).write()


class _Run:
    """The lines of one file with one model and one set of options."""

    def __init__(
        self, model: LoadedModel, source: PromptFile, target: Path | None, options: Mapping[str, Any], *, strict: bool
    ) -> None:
        self._model = model
        self._source = source
        self._target = target
        self._options = options
        self._strict = strict
        self._failed: list[int] = []  # the numbers of lines
        self._key = _hash_of(model, source.format, options)
        # A strict run prepares every line first, and any run one, which finds most faults of the command line.
        self._ahead = [self._prepare(place) for place in range(len(source) if strict else min(1, len(source)))]

    def write(self) -> int:
        """Write the records of all lines that the target does not contain; return how many lines failed."""
        target, total = self._target, len(self._source)
        with _opened(target) as out:
            done = 0 if target is None else self._resume(target)
            if done:
                click.echo(f"{target} has {done:,} of {total:,} prompts already", err=True)
            with _bar(total, done) as bar:
                for begin in range(done, total, _CHUNK):
                    places = range(begin, min(begin + _CHUNK, total))
                    self._write_chunk([self._line(place) for place in places], out)
                    bar.update(len(places))
        if target is not None:
            click.echo(f"{target} has {total:,} of {total:,} prompts", err=True)
        if self._failed:
            lines = ", ".join(map(str, self._failed[:20])) + (", ..." if len(self._failed) > 20 else "")
            where = f"{self._source.path} lines {lines}"
            click.echo(f"{len(self._failed):,} of {total:,} prompts failed, as their records say: {where}", err=True)
        return len(self._failed)

    def _write_chunk(self, lines: Sequence[_Line], out: BinaryIO) -> None:
        for line, found in zip(lines, self._continue(lines), strict=True):
            record = {"line": line.number, **line.asked.own, "prompt": line.asked.prompt, "key": line.key}
            if isinstance(found, OrtGptError):
                self._failed.append(line.number)
                values = [{"error": {"type": type(found).__name__, "message": str(found)}}]
            else:
                values = [self._values(line, completion) for completion in found]
            for each in values:
                out.write(json_text(record | each).encode() + b"\n")
        out.flush()
        if out is not sys.stdout.buffer:
            os.fsync(out.fileno())

    def _values(self, line: _Line, completion: Completion) -> dict[str, Any]:
        values, prompt = completion_values(completion), line.asked.prompt
        if line.asked.echo:
            is_text = isinstance(prompt, str) and self._model.has_text
            begin = prompt if is_text else self._model.tokenizer.decode(as_prompt(self._model, prompt))
            values["text"] = begin + completion.text
        return values

    def _continue(self, lines: Sequence[_Line]) -> list[list[Completion] | OrtGptError]:
        """Return the continuations of each line, or why there are none.

        Where a line is at fault, by logits that are not finite for example, all are computed one by one, to tell whose
        it is.
        """
        prepared = [line.prepared for line in lines if isinstance(line.prepared, PreparedPrompt)]
        try:
            completions = iter(self._complete(prepared))
        except OrtGptError as error:
            if self._strict or isinstance(error, (ClosedError, EngineError)):
                raise error.at(f"{self._source.path} lines {lines[0].number} to {lines[-1].number}") from error
            if len(lines) == 1:
                return [error]
            return [found for line in lines for found in self._continue([line])]
        return [
            [next(completions) for _ in range(line.prepared.options.num_return_sequences)]
            if isinstance(line.prepared, PreparedPrompt)
            else line.prepared
            for line in lines
        ]

    def _complete(self, prepared: Sequence[PreparedPrompt]) -> list[Completion]:
        if not prepared:
            return []
        request = Request(self._model, prepared)
        for _ in request.run():
            pass
        return [sequence.completion() for sequence in request.sequences]

    def _line(self, place: int) -> _Line:
        return self._ahead[place] if place < len(self._ahead) else self._prepare(place)

    def _prepare(self, place: int) -> _Line:
        """Prepare a line. Raises its error if the run is strict, and that of the command line if that is at fault."""
        number = self._source.lines[place][0]
        asked = self._source.read(place)
        prepared: PreparedPrompt | OrtGptError
        try:
            if asked.error is not None:
                raise asked.error
            prepared = self._prepare_prompt(asked)
        except OrtGptError as error:
            if self._strict:
                raise error.at(f"{self._source.path} line {number}") from None
            if asked.error is None and not asked.options:
                self._prepare_prompt(PromptLine([0]))  # what one token cannot have, no line can
            prepared = error
        return _Line(number, asked, self._key_of(place), prepared)

    def _prepare_prompt(self, asked: PromptLine) -> PreparedPrompt:
        resolved = self._model.resolve(GenerationOptions.make(None, {**self._options, **asked.options}))
        prepared = prepare_prompt(self._model, as_prompt(self._model, asked.prompt), resolved, resolved.seeds_for(1)[0])
        Request(self._model, [prepared])  # says what is wrong with it
        return replace(prepared, ids=array("i", prepared.ids))  # a strict run holds very many

    def _key_of(self, place: int) -> str:
        """Return what tells a record of this line, options and bundle from another's."""
        key = self._key.copy()
        key.update(self._source.lines[place][1].encode())
        return str(key.hexdigest()[:16])

    def _resume(self, target: Path) -> int:
        """Return how many lines `target` has in whole chunks, and truncate the rest.

        The lines of a chunk are computed together, which in 8 and 4 bits can change a row.
        """
        data = target.read_bytes()
        done, kept, kept_lines, count, size = 0, 0, 0, 0, 0
        for record in data.splitlines(keepends=True):
            size += len(record)
            if not record.endswith(b"\n"):
                begun = b'{"line": '
                if not record.startswith(begun[: len(record)]):
                    raise OptionError(f"{target} ends in text that this command did not write; name another --output")
                break
            try:
                values = json.loads(record)
                found = (values["line"], values["key"])
            except (ValueError, TypeError, KeyError, RecursionError):
                raise OptionError(
                    f"{target} has a line that this command did not write; name another --output"
                ) from None
            if done == len(self._source) or found != (self._source.lines[done][0], self._key_of(done)):
                raise OptionError(f"{target} was written from other prompts, options or weights; name another --output")
            count += 1
            if "error" in values or count == self._records_of(done):
                self._failed += [values["line"]] if "error" in values else []
                done, count = done + 1, 0
                if done % _CHUNK == 0 or done == len(self._source):
                    kept, kept_lines = size, done
        if kept < len(data):
            with target.open("r+b") as out:
                out.truncate(kept)
        numbers = {number for number, _ in self._source.lines[:kept_lines]}
        self._failed = [number for number in self._failed if number in numbers]
        return kept_lines

    def _records_of(self, place: int) -> Any:
        """Return how many records a line has that did not fail."""
        asked = {**self._options, **self._source.read(place).options}.get("num_return_sequences")
        return 1 if asked is None else asked


def _hash_of(model: LoadedModel, format: str, options: Mapping[str, Any]) -> Any:
    """Return a hash of all that decides the records besides the lines. It depends on content, not on objects."""
    values = {name: _digest(each) if isinstance(each, LoadedModel) else each for name, each in options.items()}
    written = json.dumps([_digest(model), format, sorted(values.items())])
    return hashlib.sha256(written.encode())


def _digest(model: LoadedModel) -> str:
    return hashlib.sha256((model.bundle.path / File.MANIFEST).read_bytes()).hexdigest()


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
    is_new = not target.exists()
    with naming(target), target.open("ab") as out:
        _lock(out, target)
        if is_new:
            sync_folder(target.parent)
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
