"""Write the hash of generation_config.json into a bundle's manifest after an edit by hand."""

from __future__ import annotations

import os
from pathlib import Path

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.files import reading
from ortgpt.bundle.folder import built_in_bundle, describe_files, find_listed, not_intact, read_manifest
from ortgpt.bundle.manifest import sealed_text
from ortgpt.bundle.writing import locked_folder, replace_file
from ortgpt.contract import File
from ortgpt.errors import BundleError, OptionError, shown
from ortgpt.options.generation_config import read_generation_config


def seal_bundle(path: str | os.PathLike[str]) -> list[str]:
    """Write size and sha256 of generation_config.json into the manifest; return the names of files that had changed.

    Every other file was verified when it was exported, so a change of one is damage. Raises BundleError for that, for
    a listed file that is missing, for a manifest that is a link, which a written file would replace, for a
    generation_config.json that could not be used, and while another process seals the bundle.
    """
    if built_in_bundle(path) is not None:
        raise BundleError(f"{os.fspath(path)} is part of ortgpt, and not to be edited; copy its folder and seal that")
    folder = Path(path)
    read_manifest(folder)  # says what is wrong with a path that is no bundle
    with locked_folder(folder) as locked:
        if not locked:
            raise BundleError(f"{folder} is being sealed by another process; run this again when that has ended")
        return _seal(folder)


def _seal(folder: Path) -> list[str]:
    values, manifest = read_manifest(folder)
    path = folder / File.MANIFEST
    if path.is_symlink():
        raise BundleError(
            f"{path} is a link to {shown(os.readlink(path))}, and other folders may share that file; copy the folder "
            "with the files themselves in place of links (`cp -rL`), edit and seal the copy"
        )
    with reading(folder):
        _, faults = find_listed(folder, manifest)
    if faults:
        raise not_intact(folder, faults)
    if File.GENERATION_CONFIG not in manifest.files:
        raise BundleError(
            f"{folder} has no {File.GENERATION_CONFIG}, the only file to edit by hand: it generates no text"
        )
    files = describe_files(folder, manifest.files)
    changed = [name for name, entry in files.items() if entry != manifest.files[name]]
    damaged = [name for name in changed if name != File.GENERATION_CONFIG]
    if damaged:
        raise not_intact(folder, [f"{name} was changed, and is not a file to edit by hand" for name in damaged])
    defaults = folder / File.GENERATION_CONFIG
    try:
        read_generation_config(read_json_object(defaults), ())
    except OptionError as error:
        raise BundleError(f"{defaults}: {error}") from None
    replace_file(path, sealed_text(values, files))
    return changed
