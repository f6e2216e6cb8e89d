"""The texts that quantisation reads: to calibrate by, and to measure on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ortgpt.generator import Generator
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.sample import Ids, sample_rows, split_rows

MIN_MEASURED = 128  # tokens; a gate on fewer says nothing


@dataclass(frozen=True)
class Text:
    """A file's name, its token ids and its size in bytes."""

    name: str
    token_ids: Ids
    size_bytes: int


@dataclass(frozen=True)
class TextRows:
    """A text in rows of token ids. `size_bytes` is that of the whole text."""

    name: str
    rows: list[Ids]
    size_bytes: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


def read_text(tokenizer: Tokenizer, path: str | Path, *, least: int) -> Text:
    """Read a UTF-8 file. Raises ExportError as read_utf8() does, or where it has fewer than `least` tokens."""
    text = read_utf8(path)
    ids = tokenizer.encode(text)
    if len(ids) < least:
        raise ExportError(f"{path} has {len(ids)} tokens (accepted: {least} or more); name a longer text")
    return Text(Path(path).name, ids, len(text.encode()))


def read_utf8(path: str | Path) -> str:
    """Return all of a file. Raises ExportError where it is no UTF-8; OSError."""
    try:
        return Path(path).read_bytes().decode("utf-8")  # its line ends as they are
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text: {error}; convert it first") from None


def spread_rows(text: Text, width: int, *, most: int) -> TextRows:
    """Cut a text into rows, and of a long one keep rows spread evenly over it, of about `most` tokens together."""
    ids = text.token_ids
    rows = [ids[begin : begin + width] for begin in range(0, len(ids), width)]
    places = np.linspace(0, len(rows) - 1, min(len(rows), max(1, most // width))).round().astype(int)
    return TextRows(text.name, [rows[place] for place in places], text.size_bytes)


def rows_to_measure(generator: Generator, text: Text | None) -> TextRows:
    """Return the rows to predict, each behind the start id; by default drawn from the model itself.

    Raises ExportError for a context of 1 token.
    """
    start_id, n_positions = generator.start_id, generator.engine.config.n_positions
    if n_positions < 2:
        raise ExportError("a model with a context of 1 token predicts no text, so nothing can be measured")
    if text is not None:
        rows = split_rows(text.token_ids, start_id, n_positions)
        return TextRows(text.name, rows, text.size_bytes)
    rows = sample_rows(generator.engine, start_id)
    size_bytes = sum(len(generator.tokenizer.token_bytes(token_id)) for row in rows for token_id in row[1:])
    return TextRows("drawn from the float32 model", rows, size_bytes)
