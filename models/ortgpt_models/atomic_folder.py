"""Write a folder so that it exists whole or not at all, however the writer ends."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextlib.contextmanager
def write_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary sibling of `out` to write into; on success it becomes `out`, else it is removed.

    With `replace`, a folder at `out` stays in place until the new one is whole; the caller decides whether it may be
    replaced. Raises FileExistsError if `out` exists and `replace` is false, or another OSError.
    """
    out = Path(os.path.abspath(out))
    refuse_existing(out, replace=replace)
    try:
        with scratch_folder(out) as partial:
            yield partial
            for path in partial.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            refuse_existing(out, replace=replace)  # another process may have created it meanwhile
            _put(partial, out)
    except OSError as error:
        if error.filename is None:  # as with a full disk
            error.filename = str(out)
        raise


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield an empty hidden folder beside `out`, and remove it at the end.

    Folders that killed writers left beside `out` are removed first: a writer locks its folder while it lives, so an
    unlocked one is left over. Missing parents of `out` are created; after an error, those that are empty are removed.
    """
    with _parents(out), contextlib.ExitStack() as lock:
        _remove_left_over(out)
        partial = _make_locked(out, lock)
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path, *, replace: bool = False) -> None:
    """Raise FileExistsError if `out` exists and may not be replaced, or is not a folder."""
    if os.path.lexists(out) and not (replace and out.is_dir() and not out.is_symlink()):
        hint = "it is not a folder" if replace else "nothing was written"
        raise FileExistsError(f"{out} already exists; {hint}: choose another name or remove it first")


def _make_locked(out: Path, lock: contextlib.ExitStack) -> Path:
    while True:
        partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir()
        # Until it is locked, another writer may take it for a left-over folder and remove it.
        with contextlib.suppress(FileNotFoundError):
            if lock.enter_context(_locked(partial)) is not False and partial.exists():
                return partial


def _remove_left_over(out: Path) -> None:
    names = re.compile(
        rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial"
    )  # exactly the names that _make_locked() makes
    for path in out.parent.iterdir():
        if names.fullmatch(path.name):
            with contextlib.suppress(OSError), _locked(path) as is_left_over:  # another user's stays
                if is_left_over:
                    shutil.rmtree(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Hold the lock on a folder; yield False if another process has it, None if the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        locked: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:
            locked = None
        yield locked
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Create the missing parents of `out`; after an error, remove those that are empty."""
    created = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _put(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; an old folder at `out` ends up at `partial`, or is removed."""
    if not out.exists():
        partial.rename(out)
    elif not _exchange(partial, out):
        old = out.with_name(f"{partial.name}.old")
        try:
            out.rename(old)
            partial.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, so that neither is ever missing; return False if the system cannot."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except AttributeError:  # not Linux, or an old one
        return False
    return bool(swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
