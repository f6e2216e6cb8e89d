"""Standard input and output of the commands: UTF-8 texts, and completions as JSON."""

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
    """Return all of a UTF-8 file, or of standard input for "-", with its line ends unchanged."""
    if path == "-" and sys.stdin is None:
        raise click.ClickException("standard input is closed; pass the text as an argument or a file")
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise click.ClickException(f"{name} is not UTF-8 text: {error}; convert it first") from error


def check_text(name: str, text: str) -> None:
    """Raise OptionError for an argument that was not UTF-8, which Python turns into half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} is not UTF-8 text from character {error.start} on; convert it first") from None


def write_text(text: str) -> None:
    """Write UTF-8 bytes to standard output, whatever the encoding of the terminal. Raises OSError."""
    try:
        with naming("standard output"):
            sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
            sys.stdout.buffer.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            drop_output()
        raise


def drop_output() -> None:
    """Redirect standard output to /dev/null, or the flush at exit would fail again."""
    with contextlib.suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_line(text: str) -> None:
    """Write a line to standard output, with control characters written out, since it may quote a file."""
    write_text(printable(text) + "\n")


def printable(text: str, *, kept: str = "") -> str:
    """Return a text with control characters written out, as \\x1b, except the characters `kept`."""
    return "".join(each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text)


def completion_values(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON values, without the fields that were not requested."""
    optional = ("logprobs", "prompt_logprobs", "score")
    values = dataclasses.asdict(completion)
    return {name: value for name, value in values.items() if value is not None or name not in optional}
