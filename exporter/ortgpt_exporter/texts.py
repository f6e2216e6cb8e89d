"""The texts that quantisation reads, to calibrate by and to measure on. Knows no recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ortgpt.bundle.files import decode_text
from ortgpt.contract import TokenizerKind
from ortgpt.errors import PromptError
from ortgpt.model import LoadedModel
from ortgpt.text.ids_only import parse_ids
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.sample import Ids, sample_rows, split_rows

_MIN_MEASURED = 128  # tokens; a measurement on fewer says nothing
_MIN_LINES = 16  # the same of texts that a classifier labels


@dataclass(frozen=True)
class TextRows:
    """A text in rows of token ids; as it is read, in one row."""

    name: str
    """The name of its file, or where it comes from."""
    rows: list[Ids]
    """The rows."""
    size_bytes: int
    """The size of the whole text in bytes; 0 for ids without a text."""

    @property
    def tokens(self) -> int:
        """How many tokens the rows have."""
        return sum(map(len, self.rows))


def read_text(tokenizer: Tokenizer, path: str | Path, *, min_tokens: int) -> TextRows:
    """Read a UTF-8 file: a text, or without a tokenizer token ids separated by white space.

    Raises ExportError if it is not UTF-8, holds anything but ids, or has fewer than `min_tokens` tokens; OSError.
    """
    text = read_utf8(path)
    is_text = tokenizer.kind != TokenizerKind.NONE
    try:
        ids = tokenizer.encode(text) if is_text else parse_ids(text, tokenizer.vocab_size)
    except PromptError as error:
        raise ExportError(f"{path}: {error}") from None
    if len(ids) < min_tokens:
        raise ExportError(f"{path} has {len(ids)} tokens (accepted: {min_tokens} or more); name a longer text")
    return TextRows(Path(path).name, [ids], len(text.encode()) if is_text else 0)


def read_lines(path: str | Path) -> list[tuple[int, str]]:
    """Return number and text of each line of a UTF-8 file that is not blank.

    Raises ExportError for fewer than 16; OSError.
    """
    lines = [(number, line) for number, line in enumerate(read_utf8(path).splitlines(), 1) if line.strip()]
    if len(lines) < _MIN_LINES:
        raise ExportError(f"{path} has {len(lines)} lines with a text (accepted: {_MIN_LINES} or more); add some")
    return lines


def read_utf8(path: str | Path) -> str:
    """Return all of a file, its line ends unchanged. Raises ExportError if it is not UTF-8; OSError."""
    data = Path(path).read_bytes()
    try:
        return decode_text(data, str(path))
    except ValueError as error:
        raise ExportError(str(error)) from None


def spread_rows(text: TextRows, width: int, *, max_tokens: int) -> TextRows:
    """Cut a text into rows of `width` tokens. Of a long text keep about `max_tokens`, in rows spread evenly over it."""
    (ids,) = text.rows
    rows = [ids[begin : begin + width] for begin in range(0, len(ids), width)]
    kept = np.linspace(0, len(rows) - 1, min(len(rows), max(1, max_tokens // width))).round().astype(int)
    return TextRows(text.name, [rows[index] for index in kept], text.size_bytes)


def rows_to_measure(model: LoadedModel, path: str | Path | None) -> TextRows:
    """Return the rows of a text to predict, each after a start id; without a text, rows drawn from the model itself.

    The size is that of the tokens to predict, which for a model without a start id leaves out the first of the text.
    Raises ExportError for a context of 1 token, or a text that is not UTF-8 or has fewer than 128 tokens; OSError.
    """
    n_positions, start_id = model.engine.config.n_positions, model.engine.config.start_id
    if n_positions < 2:
        raise ExportError("a model with a context of 1 token predicts no text, so nothing can be measured")
    if path is not None:
        text = read_text(model.tokenizer, path, min_tokens=_MIN_MEASURED)
        first = 0 if start_id is not None else model.tokenizer.size_bytes(text.rows[0][:1])
        return TextRows(text.name, split_rows(text.rows[0], start_id, n_positions), text.size_bytes - first)
    rows = sample_rows(model.engine, start_id)
    size_bytes = sum(model.tokenizer.size_bytes(row[1:]) for row in rows)
    return TextRows("drawn from the float32 model", rows, size_bytes)
