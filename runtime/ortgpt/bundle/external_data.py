"""The names of the files that an ONNX file reads its weights from, found without the package onnx. Runs nothing."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ortgpt.bundle.files import reading
from ortgpt.errors import BundleError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the ways in which protobuf writes a field
# The messages of onnx.proto that tensors lie in: field number to what it holds.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_KEY, _VALUE = 1, 2  # the fields of an entry
_MAX_LEVELS = 50

Field = tuple[int, int, int]  # number, and where its bytes begin and end


def external_files(path: Path) -> set[str]:
    """Return the names of the files that the weights of an ONNX file lie in.

    The names are read as protobuf encodes them. Raises BundleError if the file cannot be read, is not an ONNX file, or
    encodes a name in a way that readers could understand differently.
    """
    with reading(path), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return {name.decode() for name in _locations(data, "model", 0, len(data), 0)}
            except ValueError as error:
                raise BundleError(f"{path} is not an ONNX file: {error}; export it again") from None


def _locations(data: mmap.mmap, kind: str, begin: int, end: int, level: int) -> Iterator[bytes]:
    if kind == "entry":
        fields = dict[int, bytes]()
        for number, first, last in _fields(data, begin, end):
            if number in fields:
                raise ValueError(f"a field occurs twice at byte {first:,}")
            fields[number] = data[first:last]
        if fields.get(_KEY) == b"location":
            yield fields.get(_VALUE, b"")
        return
    if level > _MAX_LEVELS:
        raise ValueError(f"more than {_MAX_LEVELS} messages inside each other")
    inside = _MESSAGES[kind]
    for number, first, last in _fields(data, begin, end):
        if number in inside:
            yield from _locations(data, inside[number], first, last, level + 1)


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[Field]:
    """Yield the fields of a message that have bytes; skip others."""
    place = begin
    while place < end:
        tag, place = _varint(data, place, end)
        number, form = tag >> 3, tag & 7
        if not 0 < number < 2**29:  # parsers of protobuf read it as another number
            raise ValueError(f"a field of number {number} at byte {place:,}")
        if form == _BYTES:
            length, place = _varint(data, place, end)
            if place + length > end:
                raise ValueError(f"a field ends after its message at byte {place:,}")
            yield number, place, place + length
            place += length
        elif form == _VARINT:
            _, place = _varint(data, place, end)
        elif form in (_FIXED64, _FIXED32):
            place += 8 if form == _FIXED64 else 4
        else:
            raise ValueError(f"a field of form {form} at byte {place:,}")
    if place != end:
        raise ValueError(f"a field ends after its message at byte {end:,}")


def _varint(data: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    """Return a number and where it ends: seven bits in each byte, lowest first; the last byte has no eighth bit."""
    value = shift = 0
    while place < end and shift < 64:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError(f"a number without an end at byte {place:,}")
