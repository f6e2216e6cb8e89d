"""Read texts and files that came from elsewhere, bounded in size; name the file if the operating system fails."""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ortgpt.errors import BundleError

# The byte-order marks of encodings that are not UTF-8; that of UTF-32 begins with that of UTF-16.
_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
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


def decode_text(data: bytes, name: str) -> str:
    """Return UTF-8 bytes as text, without the byte-order mark at their beginning that some programs write.

    Line ends, and the character U+FEFF elsewhere, stay as they are. Raises ValueError, which begins with `name`, for
    bytes that are not UTF-8.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        for mark, encoding in _OTHER_MARKS:
            if data.startswith(mark):
                raise ValueError(
                    f"{name} is {encoding} text by its byte-order mark, not UTF-8; save it as UTF-8, or convert it: "
                    f"iconv -f {encoding} -t UTF-8 OLD > NEW"
                ) from None
        raise ValueError(f"{name} is not UTF-8 text: {error}; convert it first") from None


def read_text(path: Path) -> str:
    """Return the text of a plain UTF-8 file of at most MAX_SIZE_BYTES, each line end as \\n. Raises BundleError."""
    with reading(path):
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise BundleError(f"{path} is not a plain file")
        if state.st_size > MAX_SIZE_BYTES:
            raise BundleError(f"{path} has {state.st_size:,} bytes; at most {MAX_SIZE_BYTES:,} are read")
        try:
            text = decode_text(path.read_bytes(), str(path))
        except ValueError as error:
            raise BundleError(str(error)) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
