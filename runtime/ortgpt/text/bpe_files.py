"""Read the two files of a byte-level BPE, vocab.json and merges.txt, whose letters stand for bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.errors import BundleError, shown

MAX_IDS = 2**24  # more than any model has rows; a larger id is a mistake, and lists up to it would take forever

_PAIRS = re.compile(r"(?:\S++ \S++\n)*+")  # nearly every merges.txt, after its first line


def read_vocab(path: Path) -> dict[str, int]:
    """Read a vocab.json: token (in the letters of GPT-2) to id. Raises BundleError."""
    return check_ids(read_json_object(path, is_flat=True), source=str(path))


def check_ids(vocab: dict[str, Any], *, source: str) -> dict[str, int]:
    """Return `vocab` if each of its tokens has an id. Raises BundleError, which begins with `source`."""
    values = vocab.values()
    if set(map(type, values)) - {int} or min(values, default=0) < 0 or max(values, default=0) >= MAX_IDS:
        token, value = next(item for item in vocab.items() if type(item[1]) is not int or not 0 <= item[1] < MAX_IDS)
        raise BundleError(
            f"{source} maps {shown(token)} to {shown(value)}, which is not an id (accepted: integers from 0 to "
            f"{MAX_IDS - 1})"
        )
    return vocab


def parse_merges(text: str, *, source: str) -> list[tuple[str, str]]:
    """Return the pairs of the text of a merges.txt. Raises BundleError, which begins with `source`."""
    lines = text.split("\n")
    start = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[start:], start + 1):
        first, _, second = line.rstrip("\r").partition(" ")
        if first and second and " " not in second:
            merges.append((first, second))
        elif line.rstrip("\r"):
            raise BundleError(
                f"{source} line {number} is {shown(line)}; expected two tokens with one space between them"
            )
    return merges


def joined_merges(text: str, *, source: str) -> list[str]:
    """Return the token that each pair of a merges.txt joins to. Raises as parse_merges() does."""
    begin = text.find("\n") + 1 if text.startswith("#version") else 0
    if _PAIRS.fullmatch(text, begin):
        return text[begin:].replace(" ", "").split()
    return ["".join(pair) for pair in parse_merges(text, source=source)]


def byte_of_letter() -> dict[str, int]:
    """Return GPT-2's letter of each byte: printable Latin-1 means itself, the others follow from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + index): byte for index, byte in enumerate(rest)}
