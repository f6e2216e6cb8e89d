"""Standard input and output of the commands: UTF-8 texts, and strict JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import select
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ortgpt.bundle.files import decode_text, naming
from ortgpt.errors import OptionError
from ortgpt.results import Completion

_WAIT_S = 10  # for the first byte of a standard input that nobody asked to read


def read_text(path: str) -> str:
    """Return all of a UTF-8 file, or of standard input for "-": line ends unchanged, without a byte-order mark."""
    if path == "-" and sys.stdin is None:
        raise click.ClickException("standard input is closed; pass the text as an argument or a file")
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return decode_text(data, "standard input" if path == "-" else path)
    except ValueError as error:
        raise click.ClickException(printable(str(error))) from error


def read_lines() -> Iterator[str]:
    """Yield the lines of a standard input that is no terminal, without their ends and without a byte-order mark.

    A line that is not UTF-8 is reported and left out; if it is the first, raises ClickException.
    """
    for number, line in enumerate(sys.stdin.buffer):
        try:
            text = line.decode("utf-8") if number else decode_text(line, "standard input")
        except UnicodeDecodeError as error:
            click.echo(f"the line is not UTF-8: {error}", err=True)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        else:
            yield text.rstrip("\r\n")


def piped_text() -> str:
    """Return what a pipe, a socket or a file on standard input has; nothing for a terminal or /dev/null.

    A program may inherit a pipe that nobody writes to or closes, and would wait for ever. Raises ClickException if
    nothing comes for a while.
    """
    if sys.stdin is None:
        return ""
    try:
        descriptor = sys.stdin.fileno()
        kind = os.fstat(descriptor).st_mode
    except io.UnsupportedOperation:  # a stream in memory
        return read_text("-")
    except OSError:  # a descriptor that was closed after the start
        return ""
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return ""
    with contextlib.suppress(OSError, ValueError):  # Windows waits for sockets only; there a pipe is read as for "-"
        if not select.select([descriptor], [], [], _WAIT_S)[0]:
            raise click.ClickException(
                f"nothing came through standard input for {_WAIT_S} seconds; give a PROMPT (it may be empty), or - to "
                "wait for as long as it takes"
            )
    return read_text("-")


def read_argument(name: str, text: str) -> str:
    """Return the text of an argument, without a byte-order mark that came with "$(cat FILE)".

    Raises OptionError for one that was not UTF-8, which Python turns into half characters.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} is not UTF-8 text from character {error.start} on; convert it first") from None
    return text.removeprefix("\ufeff")


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


def json_text(values: Any) -> str:
    """Return values as strict JSON in one line; a number that is not finite becomes null."""
    try:
        return json.dumps(values, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def completion_values(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON values, without the fields that were not requested."""
    optional = ("logprobs", "prompt_logprobs", "score")
    values = dataclasses.asdict(completion)
    return {name: value for name, value in values.items() if value is not None or name not in optional}
