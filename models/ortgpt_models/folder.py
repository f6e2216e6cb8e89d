"""Write a folder so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary sibling of `out` to write into; on success it becomes `out`, else it is removed.

    With `replace`, a folder already at `out` stays in place until the new one is whole; the caller decides whether it
    may go. Raises FileExistsError when `out` exists and `replace` is false, and whatever the file system raises.
    """
    out = Path(os.path.abspath(out))
    refuse_existing(out, replace=replace)
    with made_parents(out), _partial_folder(out, replace=replace) as partial:
        yield partial


@contextlib.contextmanager
def made_parents(out: Path) -> Iterator[None]:
    """Make the folders that `out` is to lie in; remove those that were made, if they are empty, when an error comes."""
    made = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextlib.contextmanager
def _partial_folder(out: Path, *, replace: bool) -> Iterator[Path]:
    mark = secrets.token_hex(4)
    partial, old = (out.with_name(f".{out.name}.{mark}.{suffix}") for suffix in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        refuse_existing(out, replace=replace)  # somebody may have made it meanwhile
        try:
            if out.exists():
                out.rename(old)
            partial.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


def refuse_existing(out: Path, *, replace: bool = False) -> None:
    """Raise FileExistsError when `out` is there and may not be replaced, or is not a folder."""
    if os.path.lexists(out) and not (replace and out.is_dir() and not out.is_symlink()):
        hint = "it is not a folder" if replace else "nothing was written"
        raise FileExistsError(f"{out} already exists; {hint}: choose another name or remove it first")
