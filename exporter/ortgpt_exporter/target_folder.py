"""Where a bundle may be written."""

from __future__ import annotations

from pathlib import Path

from ortgpt.bundle.folder import OWN_NAMES, is_utf8
from ortgpt.contract import File
from ortgpt_exporter.errors import ExportError
from ortgpt_models.atomic_folder import refuse_existing


def check_target(out: Path, *, force: bool) -> None:
    """Raise FileExistsError unless `out` is free, or is a bundle and nothing more, which `force` may replace.

    Raises ExportError for a path that is no UTF-8.
    """
    if not is_utf8(str(out)):
        raise ExportError(f"{str(out)!r} is no UTF-8, which ONNX wants of a path; choose another name")
    refuse_existing(out, replace=force)
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()}
    if File.MANIFEST not in names:
        raise FileExistsError(
            f"{out} is no bundle (it has no {File.MANIFEST}), so it is not replaced; choose another name"
        )
    if out.resolve() == Path.cwd():
        raise FileExistsError(f"{out} is the current folder, which is not replaced; run this from another one")
    foreign = sorted(path.name for path in out.iterdir() if not _is_part(path))
    if foreign:
        raise FileExistsError(f"{out} also holds {', '.join(foreign)}, which would be lost; move it elsewhere first")


def _is_part(path: Path) -> bool:
    return path.is_file() and path.name in OWN_NAMES
