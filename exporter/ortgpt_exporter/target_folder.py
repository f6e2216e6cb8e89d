"""Decide where a bundle may be written. Writes and removes nothing."""

from __future__ import annotations

from pathlib import Path

from ortgpt.bundle.folder import OWN_NAMES, is_utf8
from ortgpt.contract import File
from ortgpt.errors import shown
from ortgpt_exporter.errors import ExportError
from ortgpt_models.atomic_folder import refuse_existing


def check_target(out: Path, *, force: bool) -> None:
    """Raise FileExistsError if `out` exists, except that `force` accepts a folder that holds a bundle and nothing else.

    Raises ExportError for a path that is not UTF-8.
    """
    if not is_utf8(str(out)):
        raise ExportError(f"{shown(str(out))} is not UTF-8, which ONNX requires of a path; choose another name")
    refuse_existing(out, replace=force)
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()}
    if File.MANIFEST not in names:
        raise FileExistsError(
            f"{out} is not a bundle (it has no {File.MANIFEST}), so it is not replaced; choose another name"
        )
    if out.resolve() == Path.cwd():
        raise FileExistsError(f"{out} is the current folder, which is not replaced; run this from another folder")
    foreign = sorted(path.name for path in out.iterdir() if not _is_part(path))
    if foreign:
        raise FileExistsError(f"{out} also holds {', '.join(foreign)}, which would be lost; move it elsewhere first")


def _is_part(path: Path) -> bool:
    """Tell whether a bundle has a file of this name; of a link, only the link would be removed."""
    return path.name in OWN_NAMES and (path.is_file() or path.is_symlink())
