"""Write a folder so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary sibling of `out` to write into; on success it becomes `out`, else it is removed.

    With `replace`, a folder already at `out` stays in place until the new one is whole; the caller decides whether it
    may go. Raises FileExistsError when `out` exists and `replace` is false, and whatever the file system raises.
    """
    out = Path(out)
    refuse_existing(out, replace=replace)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        yield partial
        _finish(partial)
        refuse_existing(out, replace=replace)  # somebody may have made it meanwhile
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
            os.replace(out, old)
            try:
                os.replace(partial, out)
            except BaseException:
                os.replace(old, out)
                raise
            shutil.rmtree(old)
        else:
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path, *, replace: bool = False) -> None:
    """Raise FileExistsError when `out` is there and may not be replaced, or is not a folder."""
    if os.path.lexists(out) and not (replace and out.is_dir() and not out.is_symlink()):
        hint = "it is not a folder" if replace else "nothing was written"
        raise FileExistsError(f"{out} already exists; {hint}: choose another name or remove it first")


def _finish(folder: Path) -> None:
    """Give the folder and its files ordinary permissions, and the files a place on the disk, not in a buffer."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~umask)
        with path.open("rb") as file:
            os.fsync(file.fileno())
