"""Which other files an ONNX file reads its weights from, found without the package onnx. Runs nothing."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from ortgpt.errors import BundleError
from ortgpt.reading import reading

_KEY = b"location"
# An entry of TensorProto.external_data (field 13 of onnx.proto) with its key first: the form that onnx writes. Lengths
# below 128 take one byte.
_ENTRY = re.compile(rb"\x6a([\x00-\x7f])\x0a\x08location\x12([\x00-\x7f])", re.DOTALL)


def external_files(path: Path) -> set[str]:
    """Return the names of the files that the weights of an ONNX file lie in.

    Raises BundleError where the file names one in a form that onnx does not write: it could name another so, unseen.
    """
    if path.stat().st_size == 0:
        return set()
    with reading(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return set(_names(data, path))


def _names(data: mmap.mmap, path: Path) -> Iterator[str]:
    place = data.find(_KEY)
    while place >= 0:
        entry = _ENTRY.match(data, place - 4) if place >= 4 else None
        if entry is None or entry[1][0] != entry[2][0] + 12:
            raise BundleError(f"{path} names a file of weights in a form that onnx does not write; export it anew")
        begin = entry.end()
        try:
            yield data[begin : begin + entry[2][0]].decode()
        except UnicodeDecodeError:
            raise BundleError(f"{path} names a file of weights that is no UTF-8; export it anew") from None
        place = data.find(_KEY, begin)
