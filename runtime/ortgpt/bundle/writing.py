"""Change files of a folder that others may use meanwhile: in one step, and one process at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ortgpt.bundle.files import naming


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
