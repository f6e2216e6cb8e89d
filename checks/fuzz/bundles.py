"""Damage a whole bundle: the contents of its files, their names, and what they are on disk. Touches no disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from fuzz.mutations import ANY, REFUSED, SAME, TEXT_FILES, flip_bits, mutate_bytes, mutate_text
from fuzz.values import MANIFEST, mutate_values, sealed, to_text


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str = ""
    """The path that it leads to, unless `outside` is set."""
    outside: bytes | None = None
    """The content of a file outside the bundle, to which it leads."""


@dataclass(frozen=True)
class Folder:
    """A folder where a file is expected."""


@dataclass(frozen=True)
class Fifo:
    """A pipe, which blocks whoever opens it."""


Entry = bytes | Link | Folder | Fifo
Files = Mapping[str, Entry]


@dataclass(frozen=True)
class MutatedBundle:
    """A mutated bundle."""

    name: str
    """The name of the mutation."""
    files: Files
    expected: str
    """REFUSED, SAME or ANY."""


def mutate_bundle(rng: Random, files: Mapping[str, bytes]) -> MutatedBundle:
    """Mutate a bundle in one of the ways below."""
    changed: dict[str, Entry] = dict(files)
    # A manifest that vouches for the change lets the damage get further.
    way = rng.choices(list(_BUNDLE_WAYS), [3 if "resealed" in way else 1 for way in _BUNDLE_WAYS])[0]
    name = rng.choice(list(files))
    expected = _BUNDLE_WAYS[way](rng, changed, name)
    return MutatedBundle(way, changed, SAME if changed == files else expected)


def reseal(files: dict[str, Entry], name: str, data: bytes) -> None:
    """Put `data` into a file, and its size and sha256 into the manifest."""
    manifest = files[MANIFEST]
    assert isinstance(manifest, bytes)
    values = json.loads(manifest)
    values["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files[name] = data
    files[MANIFEST] = json.dumps(sealed(values)).encode()


def _if_listed(name: str) -> str:
    """Return what a change of a file may give: only a manifest can say the same in other bytes."""
    return SAME if name == MANIFEST else REFUSED


def _content(files: dict[str, Entry], name: str) -> bytes:
    entry = files[name]
    assert isinstance(entry, bytes)
    return entry


def _flip(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[name] = flip_bits(rng, _content(files, name))
    return _if_listed(name)


def _damage(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[name] = mutate_bytes(rng, _content(files, name))[1]
    return _if_listed(name)


def _empty(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[name] = b""
    return REFUSED


def _remove(rng: Random, files: dict[str, Entry], name: str) -> str:
    del files[name]
    return REFUSED


def _swap_files(rng: Random, files: dict[str, Entry], name: str) -> str:
    other = rng.choice(list(files))
    files[name], files[other] = files[other], files[name]
    return REFUSED


def _rename_file(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[rng.choice((f"{name}.bak", name.upper(), f".{name}", f"{name} "))] = files.pop(name)
    return REFUSED


def _unlisted(rng: Random, files: dict[str, Entry], name: str) -> str:
    entry: Entry = rng.choice((b"", files[name], Link("nowhere"), Folder(), Fifo()))
    files[rng.choice(("decoder.onnx", "model.onnx.data2", ".onnx", "prefill.onnx", "select.onnx"))] = entry
    return REFUSED


def _unlisted_and_harmless(rng: Random, files: dict[str, Entry], name: str) -> str:
    entry: Entry = rng.choice((b"x", Link("nowhere"), Link(name), Folder(), Fifo(), Link(outside=b"x")))
    files[rng.choice(("README.md", ".gitattributes", "x" * 255, "\n", "é", "model.bin"))] = entry
    return SAME


def _link_outside(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[name] = Link(outside=_content(files, name))
    return _if_listed(name)


def _link_inside(rng: Random, files: dict[str, Entry], name: str) -> str:
    files["elsewhere"] = files[name]
    files[name] = Link("elsewhere")
    return SAME


def _bad_link(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[name] = Link(rng.choice(("nowhere", name, ".", "/dev/zero", "/dev/null", "x" * 300)))
    return REFUSED


def _not_a_file(rng: Random, files: dict[str, Entry], name: str) -> str:
    files[name] = rng.choice((Folder(), Fifo()))
    return REFUSED


def _manifest(rng: Random, files: dict[str, Entry], name: str) -> str:
    mutated = mutate_text(rng, MANIFEST, _content(files, MANIFEST))
    files[MANIFEST] = mutated.data
    return mutated.expected


def _sealed_manifest(rng: Random, files: dict[str, Entry], name: str) -> str:
    _, values = mutate_values(rng, MANIFEST, json.loads(_content(files, MANIFEST)))
    files[MANIFEST] = to_text(rng, sealed(values))
    return ANY


def _sealed_text(rng: Random, files: dict[str, Entry], name: str) -> str:
    name = rng.choice([text_file for text_file in TEXT_FILES if text_file != MANIFEST])
    reseal(files, name, mutate_text(rng, name, _content(files, name)).data)
    return ANY


def _sealed_config(rng: Random, files: dict[str, Entry], name: str) -> str:
    name = rng.choice(("config.json", "generation_config.json"))
    _, values = mutate_values(rng, name, json.loads(_content(files, name)))
    reseal(files, name, to_text(rng, values))
    return ANY


def _sealed_model(rng: Random, files: dict[str, Entry], name: str) -> str:
    name = rng.choice([file for file in files if ".onnx" in file])
    data = _content(files, name)
    reseal(files, name, flip_bits(rng, data) if rng.random() < 0.7 else mutate_bytes(rng, data)[1])
    return ANY


def _sealed_link(rng: Random, files: dict[str, Entry], name: str) -> str:
    """List a file that is a link: a hash says nothing about where it leads."""
    reseal(files, "listed.bin", b"x")
    files["listed.bin"] = Link(outside=b"x")
    return REFUSED


_BUNDLE_WAYS: dict[str, Callable[[Random, dict[str, Entry], str], str]] = {
    "bits flipped": _flip, "bytes damaged": _damage, "emptied": _empty, "removed": _remove, "swapped": _swap_files,
    "renamed": _rename_file, "unlisted": _unlisted, "unlisted and harmless": _unlisted_and_harmless,
    "link out of the bundle": _link_outside, "link inside": _link_inside, "link to nothing": _bad_link,
    "not a file": _not_a_file, "manifest": _manifest, "manifest, resealed": _sealed_manifest,
    "text, resealed": _sealed_text, "configuration, resealed": _sealed_config, "model, resealed": _sealed_model,
    "listed link": _sealed_link,
}  # fmt: skip
