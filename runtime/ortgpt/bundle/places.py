"""Where the files of a bundle lie once links are followed, and whether that is still the bundle. Reads no file.

Some tools make a bundle's folder of links: the cache of the Hugging Face hub links to `../../blobs`, a ConfigMap to a
folder inside. A single link that leads elsewhere is refused: it could point at any file that the user can read, and its
hash is checked late, or, with verify="size", never. ONNX Runtime 1.32 refuses weights that lie neither beside their
graph nor beside the file that the graph's name leads to, so it accepts the same folders.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ortgpt.contract import File
from ortgpt.errors import BundleError, shown

LINK_OUT = "is a link out of the bundle"


@dataclass(frozen=True)
class Place:
    """Where a file lies, and what changes when another one takes its place.

    No inode: some network file systems give a file another number each time.
    """

    path: str
    """Absolute, without links."""
    is_outside: bool
    """Whether it lies neither in the bundle's folder nor below it."""
    size: int
    changed_ns: int


def find_files(folder: Path, names: Iterable[str]) -> tuple[dict[str, Place], dict[str, str]]:
    """Return the places of a bundle's manifest and named files, and what is wrong with those that may not be opened.

    The files, with the manifest, lie in the folder or below it, or all of them directly in one other folder.
    """
    places, faults = dict[str, Place](), dict[str, str]()
    for name in (File.MANIFEST, *names):
        try:
            places[name] = _find(folder, name)
        except BundleError as error:
            faults[name] = str(error)
    if len({os.path.dirname(place.path) for place in places.values()}) > 1:
        for name in [name for name, place in places.items() if place.is_outside]:
            faults[name] = f"{name} {LINK_OUT}, to {places.pop(name).path!r}"
    return places, faults


def check_same(folder: Path, places: Mapping[str, Place]) -> None:
    """Raise BundleError if another file took the place of one, as when a link was set to a newer version."""
    for name, place in places.items():
        try:
            found = _find(folder, name)
        except BundleError as error:
            raise BundleError(f"{folder}: {error}") from None
        if found != place:
            raise BundleError(f"{folder / name} changed after the bundle was opened; load it again")


def _find(folder: Path, name: str) -> Place:
    path = folder / name
    try:
        state = path.stat()
    except OSError as error:
        if os.path.islink(path):
            raise BundleError(
                f"{name} is not a file, but a link to {shown(os.readlink(path))}: {error.strerror}"
            ) from None
        if isinstance(error, FileNotFoundError):
            raise BundleError(f"{name} is missing") from None
        raise BundleError(f"{name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(state.st_mode):
        raise BundleError(f"{name} is not a file")
    place, inside = os.path.realpath(path), os.path.join(os.path.realpath(folder), "")
    return Place(place, not place.startswith(inside), state.st_size, state.st_mtime_ns)
