"""The command classify: labels for texts, pairs of texts or tokens, and ranks of choices.

The answer goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from ortgpt.bundle.checked_json import parse_json
from ortgpt.classifier import Classifier, load_classifier
from ortgpt.classifier_input import ClassifierInput
from ortgpt.cli.options import device_options, input_options, verify_option
from ortgpt.cli.prompt_lines import PromptFile
from ortgpt.cli.streams import json_text, piped_text, printable, read_argument, write_line
from ortgpt.errors import (
    ClosedError,
    ContextLengthError,
    EngineError,
    OptionError,
    OrtGptError,
    PromptError,
    shown,
)
from ortgpt.results import Classification
from ortgpt.task_rows import LABEL, PAIR_KEYS, TEXT_KEYS, TaskRow, read_row

_CHUNK = 64  # texts that are computed and written at once
_EXPECTED = "expected"  # the name of a row's own label in its record
# The names in a record that are not the line's own; a label has another name there.
_RECORD_NAMES = frozenset({"line", "error"}).union(each.name for each in dataclasses.fields(Classification)) - {LABEL}

_Result = Classification | OrtGptError


@dataclass(frozen=True)
class _Text:
    """A text to classify; where a line holds none, `error` says why."""

    row: TaskRow
    name: str = "the text"
    """What a message calls it."""
    line: int | None = None
    """Its line in the input; None for an argument."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What else the line says, which comes back in its record."""
    error: OrtGptError | None = None


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@input_options(
    "text",
    'Take the texts from FILE; each line is a JSON text, list of ids or object with "text" or "prompt", with '
    '"text" and "text_pair", or with "context" and "choices". Its other keys come back with --json, "label" as '
    '"expected". - is standard input.',
)
@click.option(
    "--pair", "pairs", nargs=2, multiple=True, metavar="TEXT TEXT", help="Classify a pair of texts; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object for each text.")
@verify_option
@device_options
def classify(
    bundle: Path, texts: tuple[str, ...], input_file: Path | None, input_format: str | None,
    pairs: tuple[tuple[str, str], ...], as_json: bool, verify: str, device: str, threads: int | None,
) -> None:  # fmt: skip
    """Write the label of each TEXT, or of each of its tokens, by the classifier in BUNDLE.

    Without TEXT, --pair and --input, each line on standard input is a text. The answers come in the order of the texts:
    a label, or the best choice, and its probability, or, of a regression, the value; of a multi-label classifier, each
    label with a probability of 0.5 or more; of a classifier of tokens, a line for each token, and an empty line after
    each text. A text that cannot be classified gets an "error" in its place, and the exit code is 1.
    """
    given = [what for what, value in (("TEXT", texts), ("--pair", pairs), ("--input", input_file)) if value]
    if len(given) > 1:
        raise OptionError(f"{given[0]} cannot be combined with {given[1]}: give one of them")
    if input_format is not None and input_file is None:
        raise OptionError("--input-format needs --input, a file of texts")
    found = _argument_texts(texts, pairs) or _read_texts(input_file, input_format)
    failed, write = 0, _write_json if as_json else _write_plain
    with load_classifier(bundle, device=device, threads=threads, verify=verify) as classifier:
        for begin in range(0, len(found), _CHUNK):
            chunk = found[begin : begin + _CHUNK]
            for text, result in zip(chunk, _classified(classifier, chunk), strict=True):
                failed += isinstance(result, OrtGptError)
                write(text, result)
    if failed:
        click.echo(f"{failed:,} of {len(found):,} texts failed, as their answers say", err=True)
        sys.exit(1)


def _argument_texts(texts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[_Text]:
    """Return the texts of the command line. Raises OptionError."""
    what, values = ("TEXT", [{TEXT_KEYS[0]: each} for each in texts])
    if pairs:
        what, values = ("--pair", [dict(zip(PAIR_KEYS[0], pair, strict=True)) for pair in pairs])
    names = [what if len(values) == 1 else f"{what} {number}" for number in range(1, len(values) + 1)]
    return [
        _Text(read_row({key: read_argument(name, each) for key, each in value.items()}), name)
        for value, name in zip(values, names, strict=True)
    ]


def _read_texts(input_file: Path | None, input_format: str | None) -> list[_Text]:
    """Return the texts of the file, or of standard input. Raises OptionError, OSError."""
    if input_file is not None:
        source = PromptFile(input_file, input_format, refuses_text=False)
        if not source.lines:
            raise OptionError(f"--input {input_file} holds no text (accepted: a text in each line)")
        read = _plain_text if source.format == "text" else _read_json
        return [read(line, number) for number, line in source.lines]
    lines = piped_text().split("\n")
    found = [_plain_text(line.removesuffix("\r"), number) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise OptionError(
            "no text (accepted: TEXT, --pair, --input FILE, or texts on standard input, one in each line)"
        )
    return found


def _plain_text(text: Any, number: int) -> _Text:
    return _Text(TaskRow(text=text, keys=TEXT_KEYS[:1]), line=number)


def _read_json(line: str, number: int) -> _Text:
    try:
        value = parse_json(line, half_characters=True)
    except ValueError as error:
        return replace(_plain_text(None, number), error=PromptError(f"not JSON: {error}"))
    if not isinstance(value, dict):
        return _plain_text(value, number)
    try:
        row = read_row(value)
    except PromptError as error:
        own = {key: each for key, each in value.items() if key not in (*TEXT_KEYS, *_RECORD_NAMES, LABEL)}
        return replace(_plain_text(None, number), own=own, error=error)
    own = {_EXPECTED if key == LABEL else key: each for key, each in row.rest.items()}
    taken = sorted(_RECORD_NAMES & own.keys())
    if LABEL in row.rest and _EXPECTED in row.rest:
        taken.append(_EXPECTED)
    if not taken:
        return _Text(row, line=number, own=own)
    own = {key: each for key, each in own.items() if key not in taken}
    return replace(
        _plain_text(None, number),
        row=row,
        own=own,
        error=PromptError(f'"{taken[0]}" is a name that the record itself has; rename it'),
    )


def _classified(classifier: Classifier, chunk: Sequence[_Text]) -> list[_Result]:
    """Return the answer to each text, or why there is none.

    Where the logits of a text are not finite, each is computed alone, to tell whose they are.
    """
    read = [_as_input(classifier, text) for text in chunk]
    good = [each for each in read if isinstance(each, ClassifierInput)]
    try:
        results = iter(classifier.answer(good))
    except OrtGptError as error:
        if isinstance(error, (ClosedError, EngineError)):
            raise
        if len(chunk) == 1:
            return [error]
        return [result for text in chunk for result in _classified(classifier, [text])]
    return [next(results) if isinstance(each, ClassifierInput) else each for each in read]


def _as_input(classifier: Classifier, text: _Text) -> ClassifierInput | OrtGptError:
    """Return a text as the model reads it, or why it cannot be read."""
    if text.error is not None:
        return text.error
    row = text.row
    try:
        if row.has_choices:
            return classifier.read_choices(row.context, row.choices, name="the row")
        values = row.text if row.is_pair else (row.text,)
        wrong = [each for each in values if not isinstance(each, str if row.is_pair else (str, list))]
        if wrong:
            accepted = "two texts" if row.is_pair else "a text, or a list of token ids"
            raise PromptError(f"{row.keys[values.index(wrong[0])]} = {shown(wrong[0])} (accepted: {accepted})")
        return classifier.read(row.text, name=text.name)
    except (PromptError, ContextLengthError) as error:
        return error


def _write_json(text: _Text, result: _Result) -> None:
    line = {} if text.line is None else {"line": text.line}
    record = {**line, **text.own, **_given(text.row)}
    if isinstance(result, OrtGptError):
        record["error"] = {"type": type(result).__name__, "message": str(result)}
    else:
        values = dataclasses.asdict(result).items()
        record |= {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in values}
    write_line(json_text(record))


def _given(row: TaskRow) -> dict[str, Any]:
    """Return what a row asked about, by the keys that it had; a single text is always the text."""
    if row.has_choices:
        return dict(zip(row.keys, (row.context, row.choices), strict=True))
    return dict(zip(row.keys, row.text, strict=True)) if row.is_pair else {TEXT_KEYS[0]: row.text}


def _write_plain(text: _Text, result: _Result) -> None:
    for line in _plain_lines(text, result):
        write_line(line)


def _plain_lines(text: _Text, result: _Result) -> Iterator[str]:
    if isinstance(result, OrtGptError):
        where = "" if text.line is None else f"line {text.line}: "
        yield f"error  {where}{result}"
    elif result.tokens:
        width = max(len(printable(repr(token.text))) for token in result.tokens)
        for token in result.tokens:
            yield f"{token.text!r:<{width}}  {token.label}  {token.probabilities[token.label]:.4f}"
        yield ""
    elif result.label is None:
        yield "  ".join(f"{value:.4f}" for value in result.logits.tolist())
    else:
        yield "  ".join(f"{label}  {result.probabilities[label]:.4f}" for label in result.labels) or "none"
