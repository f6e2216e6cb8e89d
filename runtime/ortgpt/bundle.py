"""A bundle on disk: the folder is compared with its manifest before anything in it is used. Opens no model."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.contract import File
from ortgpt.errors import BundleError, BundleNotFoundError, OptionError
from ortgpt.files import reading
from ortgpt.manifest import Check, Evidence, FileEntry, GraphSpec, Manifest, Precision, Source
from ortgpt.messages import listed, shown
from ortgpt.strict_json import read_json_object

OWN_NAMES = frozenset(value for name, value in vars(File).items() if name.isupper())
_MOST = 2**31 - 1  # what the graph can count
_MOST_LAYERS = 4096  # each has names of its own; more is a mistake, and lists of them would take for ever
_REQUIRED = (File.CONFIG, File.GENERATION_CONFIG, File.VOCAB, File.MERGES)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the runtime needs of config.json; the names are Hugging Face's."""

    n_layer: int
    n_head: int
    n_positions: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json. Raises BundleError naming every value that does not fit."""
        counts: dict[str, Any] = {name: values.get(name) for name in ("n_layer", "n_head", "n_positions", "vocab_size")}
        faults = [
            f"{name} = {shown(value)} (accepted: an integer from 1 to {_most(name)})"
            for name, value in counts.items()
            if type(value) is not int or not 1 <= value <= _most(name)
        ]
        vocab_size = counts["vocab_size"] if type(counts["vocab_size"]) is int else 0
        special = {name: values.get(name) for name in ("bos_token_id", "eos_token_id")}
        faults += [
            f"{name} = {shown(value)} (accepted: null or an id of the vocabulary)"
            for name, value in special.items()
            if value is not None and not (type(value) is int and 0 <= value < vocab_size)
        ]
        if faults:
            raise BundleError(f"{File.CONFIG} has faults: {listed(faults)}")
        eos = special["eos_token_id"]
        return cls(**counts, bos_token_id=special["bos_token_id"], eos_token_ids=() if eos is None else (eos,))


@dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """What `ortgpt info` shows: model, precision, source, files, and how the graph was verified."""

    path: str
    task: str
    precision: Precision
    graphs: tuple[GraphSpec, ...]
    n_layer: int
    n_head: int
    n_positions: int
    vocab_size: int
    masked_tokens: int
    source: Source
    minimum_onnxruntime: str
    size_bytes: int
    file_sizes_bytes: Mapping[str, int]
    verification: tuple[Check, ...]
    evidence: Evidence | None


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle: folder, manifest, configuration and the generation defaults as parsed JSON."""

    path: Path
    manifest: Manifest
    config: ModelConfig
    generation_config: Mapping[str, Any]

    def info(self) -> BundleInfo:
        """Return what the bundle is, in one flat record."""
        manifest, config = self.manifest, self.config
        return BundleInfo(
            path=str(self.path),
            task=manifest.task,
            precision=manifest.precision,
            graphs=manifest.graphs,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_positions=config.n_positions,
            vocab_size=config.vocab_size,
            masked_tokens=manifest.masked_tokens,
            source=manifest.source,
            minimum_onnxruntime=manifest.minimum_onnxruntime,
            size_bytes=sum(entry.size for entry in manifest.files.values()),
            file_sizes_bytes={name: entry.size for name, entry in manifest.files.items()},
            verification=manifest.verification,
            evidence=manifest.evidence,
        )

    def verify_hashes(self) -> None:
        """Read every listed file. Raises BundleError naming each whose sha256 is not the manifest's."""
        faults = [
            f"{name} does not have the sha256 of the manifest"
            for name, entry in self.manifest.files.items()
            if sha256_of(self.path / name) != entry.sha256
        ]
        if faults:
            raise not_intact(self.path, faults)


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle folder and check that it holds what its manifest lists (sizes; not yet the hashes).

    Beside it there may be files of other names than a bundle's. Raises OptionError for what is no path,
    BundleNotFoundError when there is no bundle at `path`, else BundleError with every fault of the manifest, or, where
    it has none, of the folder, or of config.json.
    """
    try:
        folder = Path(os.path.abspath(path))  # the current folder may change before a second graph is opened
    except TypeError:
        raise OptionError(f"path = {shown(path)} (accepted: a text or a path of the file system)") from None
    _, manifest = read_manifest(folder)
    with reading(folder):
        faults = list(_folder_faults(folder, manifest))
    if faults:
        raise not_intact(folder, faults)
    return Bundle(
        path=folder,
        manifest=manifest,
        config=ModelConfig.from_dict(read_json_object(folder / File.CONFIG)),
        generation_config=read_json_object(folder / File.GENERATION_CONFIG),
    )


def is_bundle_name(name: str) -> bool:
    """Tell whether a file of this name in a bundle's folder would be taken for a part of it."""
    return name in OWN_NAMES or ".onnx" in name


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return size in bytes and sha256 of the named files. Raises BundleError where one cannot be read."""
    with reading(folder):
        return {
            name: FileEntry(size=(folder / name).stat().st_size, sha256=sha256_of(folder / name))
            for name in sorted(names)
        }


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal. Raises BundleError where it cannot be read."""
    digest, block = hashlib.sha256(), memoryview(bytearray(2**20))
    with reading(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def read_manifest(folder: Path) -> tuple[dict[str, Any], Manifest]:
    """Return the manifest as parsed JSON, and as read. Raises BundleNotFoundError where there is none."""
    path = folder / File.MANIFEST
    if not is_utf8(str(folder)):
        raise BundleNotFoundError(f"{str(folder)!r} is no UTF-8, which ONNX Runtime wants of a path; rename the folder")
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except PermissionError as error:
        raise BundleError(f"{folder} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # what cannot be a path, a name too long say, leads to nothing, too
        raise BundleNotFoundError(_not_found(folder, "does not exist")) from None
    if not is_folder:
        raise BundleNotFoundError(_not_found(folder, "is a file"))
    with reading(folder):
        names = os.listdir(folder)
    if File.MANIFEST not in names:
        raise BundleNotFoundError(_not_found(folder, f"holds no {File.MANIFEST}"))
    if _is_outside(folder, File.MANIFEST):
        raise BundleError(f"{path} is a link out of the bundle")
    try:
        values = read_json_object(path)
        return values, Manifest.from_values(values)
    except BundleError as error:
        raise BundleError(f"{folder}: {error}") from None


def _folder_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name in (*_REQUIRED, *(graph.file for graph in manifest.graphs)):
        if name not in manifest.files:
            yield f"{name!r} is not listed in the manifest"
    yield from listed_file_faults(folder, manifest)
    for name, entry in manifest.files.items():
        path = folder / name
        if _is_plain(name) and os.path.isfile(path) and (size := path.stat().st_size) != entry.size:
            yield f"{name} has {size:,} bytes, the manifest says {entry.size:,}"
    for name in sorted(os.listdir(folder)):
        if name not in manifest.files and name != File.MANIFEST and is_bundle_name(name):
            yield f"{shown(name)} is not listed in the manifest"


def listed_file_faults(folder: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the listed files: those that are not there, no files, or not inside the bundle."""
    faults = []
    for name in manifest.files:
        if not _is_plain(name):
            faults.append(f"the manifest lists {shown(name)}, which is not a plain file name")
        elif _is_outside(folder, name):
            faults.append(f"{name} is a link out of the bundle")
        elif not os.path.isfile(folder / name):
            faults.append(f"{name} is {'no file' if os.path.lexists(folder / name) else 'missing'}")
    return faults


def _is_outside(folder: Path, name: str) -> bool:
    path = folder / name
    return os.path.islink(path) and os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder)


def is_utf8(path: str) -> bool:
    """Tell whether a path is UTF-8; of another, Python makes half characters."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and len(name) <= 255 and name.isprintable() and not {"/", "\\"} & set(name)


def _most(name: str) -> int:
    return _MOST_LAYERS if name == "n_layer" else _MOST


def _not_found(folder: Path, state: str) -> str:
    return f"{folder} {state}; expected a bundle folder, as `ortgpt export` writes it"


def not_intact(folder: Path, faults: list[str]) -> BundleError:
    """Return the error that says what a bundle's faults are, and what to do."""
    hint = ""
    if len(faults) == 1 and faults[0].startswith(File.GENERATION_CONFIG):
        hint = " (after an edit by hand: `ortgpt seal` states its new hash)"
    return BundleError(f"{folder} is not intact: {listed(faults)}. Copy or export it anew{hint}")
