"""Read files that came from elsewhere, bounded in size; replace a file safely; name the file if the system fails."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
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


def replace_file(path: Path, text: str) -> None:
    """Write a UTF-8 text in the place of a file in one step: after a power cut, the old or the new one is there whole.

    Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        # "x" never follows a link that somebody put there.
        with naming(path), partial.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk, where the system can: Windows opens no folders. Raises OSError."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[bool]:
    """Hold the lock on a folder; yield False if another process has it. Without locks, as on Windows, yield True."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:  # the file system has none
            pass
        yield locked
    finally:
        os.close(descriptor)


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
