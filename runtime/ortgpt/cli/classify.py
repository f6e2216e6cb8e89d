"""The command classify: labels for texts, or for their tokens. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from ortgpt.bundle.checked_json import parse_json
from ortgpt.classifier import Classifier, load_classifier
from ortgpt.cli.options import device_options
from ortgpt.cli.prompt_lines import FORMATS, PromptFile
from ortgpt.cli.streams import json_text, piped_text, printable, read_argument, write_line
from ortgpt.errors import ClosedError, EngineError, OptionError, OrtGptError, PromptError, shown
from ortgpt.results import Classification

_CHUNK = 64  # texts that are computed and written at once
_KEYS = ("text", "prompt")
# The names in a record that are not the line's own.
_RECORD_NAMES = frozenset({"line", "error", *_KEYS}).union(each.name for each in dataclasses.fields(Classification))

_Result = Classification | OrtGptError


@dataclass(frozen=True)
class _Text:
    """A text to classify; where a line holds none, `error` says why."""

    text: Any
    line: int | None = None
    """Its line in the input; None for an argument."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What else the line says, which comes back in its record."""
    error: OrtGptError | None = None


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option(
    "--input",
    "input_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Take the texts from FILE; each line is a JSON text, list of ids or object with "text" or "prompt", whose '
    "other keys come back with --json. - is standard input.",
)
@click.option(
    "--input-format",
    type=click.Choice(FORMATS),
    help="With --input: JSON in each line, or plain text, of which each line is a text. [default: text for *.txt, "
    "else jsonl]",
)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object for each text.")
@click.option(
    "--verify",
    type=click.Choice(["sha256", "size"]),
    default="sha256",
    show_default=True,
    help="What of the bundle's files to compare with its manifest.",
)
@device_options
def classify(
    bundle: Path, texts: tuple[str, ...], input_file: Path | None, input_format: str | None, as_json: bool,
    verify: str, device: str, threads: int | None,
) -> None:  # fmt: skip
    """Write the label of each TEXT, or of each of its tokens, by the classifier in BUNDLE.

    Without TEXT and --input, each line on standard input is a text. The answers come in the order of the texts: a label
    and its probability, or, of a regression, the value; of a multi-label classifier, each label with a
    probability of 0.5 or more; of a classifier of tokens, a line for each token, and an empty line after each text. A
    text that cannot be classified gets an "error" in its place, and the exit code is 1.
    """
    if texts and input_file is not None:
        raise OptionError("TEXT cannot be combined with --input, which has the texts in a file")
    if input_format is not None and input_file is None:
        raise OptionError("--input-format needs --input, a file of texts")
    found = _read_texts(texts, input_file, input_format)
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


def _read_texts(texts: Sequence[str], input_file: Path | None, input_format: str | None) -> list[_Text]:
    """Return the texts of the command line, the file or standard input. Raises OptionError, PromptError, OSError."""
    if texts:
        return [_Text(read_argument("TEXT", text)) for text in texts]
    if input_file is not None:
        source = PromptFile(input_file, input_format)
        read = _Text if source.format == "text" else _read_json
        return [read(line, number) for number, line in source.lines]
    lines = piped_text().split("\n")
    found = [_Text(line.removesuffix("\r"), number) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise OptionError("no text (accepted: TEXT, --input FILE, or texts on standard input, one in each line)")
    return found


def _read_json(line: str, number: int) -> _Text:
    try:
        value = parse_json(line, half_characters=True)
    except ValueError as error:
        return _Text(None, number, error=PromptError(f"not JSON: {error}"))
    if not isinstance(value, dict):
        return _Text(value, number)
    keys = [key for key in _KEYS if key in value]
    rest = {key: each for key, each in value.items() if key not in keys}
    taken = sorted(_RECORD_NAMES & rest.keys())
    if len(keys) == 1 and not taken:
        return _Text(value[keys[0]], number, rest)
    own = {key: each for key, each in rest.items() if key not in taken}
    wrong = (
        f'"{taken[0]}" is a name that the record itself has; rename it'
        if taken
        else 'an object with "text" or with "prompt" is accepted, not with both or neither'
    )
    return _Text(None, number, own, PromptError(wrong))


def _classified(classifier: Classifier, chunk: Sequence[_Text]) -> list[_Result]:
    """Return the answer to each text, or why there is none.

    Where a text is at fault, each is computed alone, to tell whose it is.
    """
    good = [text for text in chunk if text.error is None]
    results: Iterator[_Result]
    try:
        results = iter(classifier.classify([_checked(text.text) for text in good]))
    except OrtGptError as error:
        if isinstance(error, (ClosedError, EngineError)):
            raise
        if len(chunk) == 1:
            return [error]
        return [result for text in chunk for result in _classified(classifier, [text])]
    return [next(results) if text.error is None else text.error for text in chunk]


def _checked(text: Any) -> Any:
    if not isinstance(text, (str, list)):
        raise PromptError(f"text = {shown(text)} (accepted: a text, or a list of token ids)")
    return text


def _write_json(text: _Text, result: _Result) -> None:
    line = {} if text.line is None else {"line": text.line}
    record = {**line, **text.own, "text": text.text}
    if isinstance(result, OrtGptError):
        record["error"] = {"type": type(result).__name__, "message": str(result)}
    else:
        values = dataclasses.asdict(result).items()
        record |= {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in values}
    write_line(json_text(record))


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
