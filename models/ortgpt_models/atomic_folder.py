"""Write a folder so that it exists whole or not at all, however the writer or the machine ends.

Windows opens no folders, so it neither locks them nor writes them through to the disk: what killed writers left stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

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
            _sync_all(partial)
            _unmap()
            refuse_existing(out, replace=replace)  # another process may have created it meanwhile
            _put(partial, out, replace=replace)
            sync_folder(out.parent)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # as with a full disk; not of refuse_existing()
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
            _unmap()
            shutil.rmtree(partial, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    """Write a folder with all that is in it through to the disk."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _sync_all(path)
        else:
            sync_file(path)
    sync_folder(folder)


def _unmap() -> None:
    """Free graphs that nobody uses any more: Windows moves and removes no folder while one of its files is mapped."""
    if os.name == "nt":
        gc.collect()


def refuse_existing(out: Path, *, replace: bool = False) -> None:
    """Raise FileExistsError if `out` exists and may not be replaced, or is not a folder."""
    try:
        mode = os.lstat(out).st_mode  # asked once, as another process may move it between two questions
    except (OSError, ValueError):  # a name that is too long, for example, does not exist either
        return
    if not (replace and stat.S_ISDIR(mode)):
        hint = "it is not a folder" if replace else "nothing was written"
        raise FileExistsError(f"{out} already exists; {hint}: choose another name or remove it first")


def _make_locked(out: Path, lock: contextlib.ExitStack) -> Path:
    while True:
        partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir()
        # Until it is locked, another writer may take it for a left-over folder and remove it.
        with contextlib.suppress(FileNotFoundError):
            if lock.enter_context(locked_folder(partial)) is not False:
                return partial


def _remove_left_over(out: Path) -> None:
    names = re.compile(
        rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial"
    )  # exactly the names that _make_locked() makes
    for path in out.parent.iterdir():
        if names.fullmatch(path.name):
            with contextlib.suppress(OSError), locked_folder(path) as is_left_over:  # another user's stays
                if is_left_over:
                    shutil.rmtree(path)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[bool | None]:
    """Hold the lock on a folder; yield False if another process has it, None if there are no locks.

    Raises FileNotFoundError where the folder is gone, also if another one has taken its place.
    """
    if fcntl is None:
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        locked: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:  # the file system has none
            locked = None
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield locked
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Let a file reach the disk. Raises OSError."""
    with path.open("r+b" if os.name == "nt" else "rb") as file:  # Windows syncs only what may be written
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk, where the system can. Raises OSError."""
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
def _parents(out: Path) -> Iterator[None]:
    """Create the missing parents of `out`; after an error, remove those that are empty."""
    created = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for folder in created:
            sync_folder(folder.parent)
        yield
    except BaseException:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _put(partial: Path, out: Path, *, replace: bool) -> None:
    """Rename `partial` to `out`; an old folder at `out` ends up at `partial`, or is removed.

    Raises FileExistsError where another process has created `out` meanwhile, and `replace` is false.
    """
    while True:
        try:
            if not (replace and out.exists()):
                partial.rename(out)  # fails where a folder with files is there by now
            elif not _exchange(partial, out):
                _replace(partial, out)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT) or not partial.exists():
                raise
            refuse_existing(out, replace=replace)  # another writer was faster: replace what it wrote, if that may be


def _replace(partial: Path, out: Path) -> None:
    """Rename the folder `out` away and `partial` to it, in two steps."""
    old = out.with_name(f"{partial.name}.old")
    try:
        out.rename(old)
        partial.rename(out)
    except BaseException as error:
        if old.exists():
            if out.exists():  # another writer's
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(out)
        if os.name == "nt" and isinstance(error, PermissionError):
            raise PermissionError(
                error.errno,
                "Windows does not replace a folder while a program has one of its files open; close the programs that "
                "loaded it, or choose another name",
                str(out),
            ) from error
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, so that neither is ever missing; return False if the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        swap = ctypes.CDLL(None).renameat2
    except AttributeError:  # of an old C library
        return False
    return bool(swap(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
