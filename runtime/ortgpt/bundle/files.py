"""Read files that came from elsewhere, bounded in size; name the file if the operating system fails."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ortgpt.errors import BundleError

MAX_SIZE_BYTES = 32 * 2**20  # of a file that is read whole; a vocabulary of a million tokens has fewer


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the operating system about `path` into a BundleError."""
    try:
        yield
    except FileNotFoundError:
        state = f"is a link to nowhere, {os.readlink(path)!r}" if os.path.islink(path) else "is missing"
        raise BundleError(f"{path} {state}") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an OSError name `path` if it names no file, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the text of a plain file of at most MAX_SIZE_BYTES. Raises BundleError."""
    with reading(path):
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise BundleError(f"{path} is not a plain file")
        if state.st_size > MAX_SIZE_BYTES:
            raise BundleError(f"{path} has {state.st_size:,} bytes; at most {MAX_SIZE_BYTES:,} are read")
        try:
            return path.read_text(encoding=encoding)
        except UnicodeDecodeError as error:
            raise BundleError(f"{path} is not UTF-8 text: {error}") from None
