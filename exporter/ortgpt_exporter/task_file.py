"""Read a file of JSON lines with the rows of a task: what each asks about, and its label. Knows no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.classifier_input import ClassifierInput, InputReader
from ortgpt.errors import ContextLengthError, PromptError, shown
from ortgpt.task_rows import TaskRow, parse_object, read_row
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.texts import read_utf8

_MAX_FAULTS = 5  # shown of one file


@dataclass(frozen=True, kw_only=True)
class LabelledRow:
    """A row of a file as the model reads it, with its label."""

    line: int
    """Its line in the file."""
    asked: ClassifierInput
    """The text, pair or choices."""
    text: str
    """The line itself."""
    label: Any
    """What `read_label` of read_labelled_rows() returned."""


def is_json_lines(path: str | Path) -> bool:
    """Tell whether a file holds JSON lines, by its name."""
    return Path(path).suffix.lower() == ".jsonl"


def read_task_row(reader: InputReader, line: str, name: str) -> ClassifierInput:
    """Return what a line of JSON asks about. Raises PromptError or ContextLengthError, which name it."""
    try:
        return _as_input(reader, read_row(parse_object(line)))
    except (PromptError, ContextLengthError) as error:
        raise error.at(name) from None


def read_labelled_rows(path: Path, reader: InputReader, read_label: Callable[[TaskRow], Any]) -> list[LabelledRow]:
    """Return the rows of a file of JSON lines; `read_label` returns a row's label, or raises PromptError.

    Raises ExportError that names all bad lines at once, the first few with their faults, or says that there is no row;
    OSError.
    """
    rows, faults = [], []
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = read_row(parse_object(line))
            asked = _as_input(reader, row)
            rows.append(LabelledRow(line=number, asked=asked, text=line, label=read_label(row)))
        except (PromptError, ContextLengthError) as error:
            faults.append(f"line {number}: {error}")
    if faults:
        more = len(faults) - _MAX_FAULTS
        listed = "; ".join(faults[:_MAX_FAULTS]) + (f"; and {more:,} more" if more > 0 else "")
        rows_at_fault = "1 row" if len(faults) == 1 else f"{len(faults):,} rows"
        raise ExportError(f"{path} has {rows_at_fault} that cannot be used: {listed}")
    if not rows:
        raise ExportError(f"{path} has no row (accepted: a JSON object in each line)")
    return rows


def _as_input(reader: InputReader, row: TaskRow) -> ClassifierInput:
    if row.has_choices:
        return reader.read_choices(row.context, row.choices, "the row")
    for key, value in zip(row.keys, row.text if row.is_pair else (row.text,), strict=True):
        if not isinstance(value, str) or not value.strip():
            raise PromptError(f"{key} = {shown(value)} (accepted: a text that is not blank)")
    return reader.read(row.text, "the row" if row.is_pair else row.keys[0])
