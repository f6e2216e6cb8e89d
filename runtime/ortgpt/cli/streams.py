"""What the commands read and write: UTF-8 texts, and completions as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from ortgpt.bundle.files import naming
from ortgpt.errors import OptionError
from ortgpt.results import Completion


def read_text(path: str) -> str:
    """Return all of a UTF-8 file, or of standard input for "-", its line ends as they are."""
    if path == "-" and sys.stdin is None:
        raise click.ClickException("standard input is closed; give the text otherwise")
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise click.ClickException(f"{name} is not UTF-8 text: {error}; convert it first") from error


def check_text(name: str, text: str) -> None:
    """Raise OptionError for an argument that was no UTF-8, of which Python makes half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} is not UTF-8 text from character {error.start} on; convert it first") from None


def write_text(text: str) -> None:
    """Write to standard output, in bytes, so that no encoding of the terminal can fail. Raises OSError."""
    try:
        with naming("standard output"):
            sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
            sys.stdout.buffer.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            drop_output()
        raise


def drop_output() -> None:
    """Let standard output lead nowhere: Python would try once more to write what is left, and fail again."""
    with contextlib.suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_line(text: str) -> None:
    """Write a line to standard output; what is no printable character in it, out of a file, say, is written out."""
    write_text(printable(text) + "\n")


def printable(text: str, *, kept: str = "") -> str:
    """Return a text in which what a terminal would obey is written out, as \\x1b, but for the characters `kept`."""
    return "".join(each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text)


def completion_values(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON has it, without what was not asked for."""
    optional = ("logprobs", "prompt_logprobs", "score")
    values = dataclasses.asdict(completion)
    return {name: value for name, value in values.items() if value is not None or name not in optional}
