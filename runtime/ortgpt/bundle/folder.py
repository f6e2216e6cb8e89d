"""A bundle on disk: the folder is compared with its manifest before any file of it is used. Opens no model."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.files import reading
from ortgpt.bundle.label_config import LabelConfig
from ortgpt.bundle.manifest import FileEntry, Manifest
from ortgpt.bundle.model_config import ModelConfig
from ortgpt.bundle.places import LINK_OUT, Place, check_same, find_files
from ortgpt.contract import TOKENIZER_FILES, File, Task
from ortgpt.errors import BundleError, BundleNotFoundError, OptionError, listed, shown

BUILT_IN = Path(__file__).parents[1] / "builtin"
BUILT_IN_NAMES = ("austen",)
OWN_NAMES = frozenset(value for name, value in vars(File).items() if name.isupper())
_REQUIRED = (File.CONFIG,)  # whatever the task and the kind of tokenizer


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle: its folder, manifest and configuration."""

    path: Path
    manifest: Manifest
    config: ModelConfig
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """The generation defaults as parsed JSON; empty for a classifier, which has none."""
    labels: LabelConfig | None = None
    """The labels of a classifier."""
    places: Mapping[str, Place] = field(default_factory=dict, compare=False, repr=False)
    """Where each file was when the bundle was opened; empty for one that is being written or was just moved."""

    def check_same(self, names: Iterable[str] | None = None) -> None:
        """Raise BundleError if a named file, by default any, changed after the bundle was opened."""
        wanted = self.places.keys() if names is None else set(names)
        check_same(self.path, {name: place for name, place in self.places.items() if name in wanted})

    def verify_hashes(self, names: Iterable[str] | None = None, *, stop: threading.Event | None = None) -> None:
        """Read the named files, by default all. Raises BundleError that names each whose sha256 is not the manifest's.

        Raises CancelledError soon after `stop` is set.
        """
        hash_of = sha256_of if stop is None else partial(sha256_of, stop=stop)
        files = self.manifest.files
        faults = [
            f"{name} does not have the sha256 of the manifest"
            for name in (files if names is None else names)
            if hash_of(self.path / name) != files[name].sha256
        ]
        if faults:
            raise not_intact(self.path, faults)


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle folder, or a built-in bundle, and check that it holds what its manifest lists (not yet the hashes).

    The folder may hold further files whose names are not those of a bundle. Raises OptionError for a value that is not
    a path, BundleNotFoundError if there is no bundle at `path`, else BundleError with every fault of the manifest, or,
    if it has none, of the folder, or of config.json.
    """
    try:
        # Absolute, since the current folder may change before a second graph is opened.
        folder = built_in_bundle(path) or Path(os.path.abspath(path))
    except TypeError:
        raise OptionError.bad_value("path", path, "a text or a path of the file system") from None
    _, manifest = read_manifest(folder)
    with reading(folder):
        places, faults = find_listed(folder, manifest)
        faults = [*_unlisted(manifest), *faults, *_folder_faults(folder, manifest, places)]
    if faults:
        raise not_intact(folder, faults)
    values, generates = read_json_object(folder / File.CONFIG), manifest.task == Task.TEXT_GENERATION
    return Bundle(
        path=folder,
        manifest=manifest,
        config=ModelConfig.from_dict(values),
        generation_config=read_json_object(folder / File.GENERATION_CONFIG) if generates else {},
        labels=None if generates else LabelConfig.from_dict(values, manifest.task),
        places=places,
    )


def built_in_bundle(path: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the built-in bundle called `path`; None for any other path, and if a folder is there."""
    name = os.fspath(path)
    return BUILT_IN / name if name in BUILT_IN_NAMES and not os.path.isdir(name) else None


def is_bundle_name(name: str) -> bool:
    """Tell whether a file of this name in a bundle's folder would be taken for a part of the bundle."""
    return name in OWN_NAMES or ".onnx" in name


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return size in bytes and sha256 of the named files. Raises BundleError if one cannot be read."""
    with reading(folder):
        return {
            name: FileEntry(size=(folder / name).stat().st_size, sha256=sha256_of(folder / name))
            for name in sorted(names)
        }


def sha256_of(path: Path, *, stop: threading.Event | None = None) -> str:
    """Return the sha256 of a file in hexadecimal. Raises BundleError if it cannot be read.

    Raises CancelledError soon after `stop` is set.
    """
    digest, block = hashlib.sha256(), memoryview(bytearray(2**20))
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            if stop is not None and stop.is_set():
                raise CancelledError
    return digest.hexdigest()


def read_manifest(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """Return the manifest as parsed JSON and as a dataclass. Raises BundleError or BundleNotFoundError."""
    path = folder / File.MANIFEST
    if not is_utf8(str(folder)):
        raise BundleNotFoundError(
            f"{str(folder)!r} is not UTF-8, which ONNX Runtime requires of a path; rename the folder"
        )
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except PermissionError as error:
        raise BundleError(f"{folder} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # a name that is too long, for example, does not exist either
        raise BundleNotFoundError(_not_found(folder, "does not exist")) from None
    if not is_folder:
        raise BundleNotFoundError(_not_found(folder, "is a file"))
    with reading(folder):
        names = os.listdir(folder)
    if File.MANIFEST not in names:
        raise BundleNotFoundError(_not_found(folder, f"holds no {File.MANIFEST}"))
    # Which further files a bundle needs, the manifest decides.
    places, faults = find_files(
        folder, [*_REQUIRED, *([File.GENERATION_CONFIG] if File.GENERATION_CONFIG in names else [])]
    )
    manifest = places.get(File.MANIFEST)
    if faults and (manifest is None or manifest.is_outside):  # it is read from elsewhere only if the others lie there
        raise not_intact(folder, list(faults.values()))
    try:
        values = read_json_object(path)
        return values, Manifest.from_values(values)
    except BundleError as error:
        raise BundleError(f"{folder}: {error}") from None


def _unlisted(manifest: Manifest) -> Iterator[str]:
    defaults = (File.GENERATION_CONFIG,) if manifest.task == Task.TEXT_GENERATION else ()
    of_tokenizer = TOKENIZER_FILES[manifest.tokenizer.kind]
    for name in (*_REQUIRED, *defaults, *of_tokenizer, *(graph.file for graph in manifest.graphs)):
        if name not in manifest.files:
            yield f"{name!r} is not listed in the manifest"


def _folder_faults(folder: Path, manifest: Manifest, places: Mapping[str, Place]) -> Iterator[str]:
    for name, entry in manifest.files.items():
        if name in places and places[name].size != entry.size:
            yield f"{name} has {places[name].size:,} bytes, the manifest says {entry.size:,}"
    for name in sorted(os.listdir(folder)):
        if name not in manifest.files and name != File.MANIFEST and is_bundle_name(name):
            yield f"{shown(name)} is not listed in the manifest"


def find_listed(folder: Path, manifest: Manifest) -> tuple[dict[str, Place], list[str]]:
    """Return the place of each file of a bundle, and the faults of those that may not be opened."""
    places, faults = find_files(folder, filter(_is_plain, manifest.files))
    odd = (name for name in manifest.files if not _is_plain(name))
    return places, [
        *(f"the manifest lists {shown(name)}, which is not a plain file name" for name in odd),
        *faults.values(),
    ]


def is_utf8(path: str) -> bool:
    """Tell whether a path is UTF-8; Python turns other bytes into half characters."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and len(name) <= 255 and name.isprintable() and not set("/\\:") & set(name)


def _not_found(folder: Path, state: str) -> str:
    if folder.name in BUILT_IN_NAMES and folder.is_dir():
        return f"{folder} {state}, and hides the built-in bundle of its name; rename it, or give the path of a bundle"
    return f"{folder} {state}; expected a bundle folder, as `ortgpt export` writes it, or {', '.join(BUILT_IN_NAMES)}"


def not_intact(folder: Path, faults: list[str]) -> BundleError:
    """Return the error that names a bundle's faults, and says what to do."""
    hint = ""
    if any(LINK_OUT in fault for fault in faults):
        hint = ", with the files themselves in place of links (`cp -rL`)"
    elif len(faults) == 1 and faults[0].startswith(File.GENERATION_CONFIG):
        hint = " (after an edit by hand: `ortgpt seal` writes its new hash)"
    return BundleError(f"{folder} is not intact: {listed(faults)}. Copy or export it again{hint}")
