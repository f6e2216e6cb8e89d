"""What the commands read and write: UTF-8 texts, and completions as JSON."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from ortgpt.completion import Completion


def read_text(path: str) -> str:
    """Return all of a UTF-8 file, or of standard input for "-", its line ends as they are."""
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise click.ClickException(f"{name} is not UTF-8 text: {error}; convert it first") from error


def write_text(text: str) -> None:
    """Write to standard output, in bytes, so that no encoding of the terminal can fail."""
    sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
    sys.stdout.buffer.flush()


def completion_values(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON has it, without what was not asked for."""
    optional = ("logprobs", "prompt_logprobs", "score")
    values = dataclasses.asdict(completion)
    return {name: value for name, value in values.items() if value is not None or name not in optional}
