"""Damage one file of a bundle: pure functions from its bytes to mutated ones.

Every choice comes from the random.Random of the caller, so a seed names an input. Touches no disk and calls no reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from fuzz.values import MANIFEST, mutate_values, sealed, to_text

JSON_FILES = (MANIFEST, "config.json", "generation_config.json", "vocab.json")
TEXT_FILES = (*JSON_FILES, "merges.txt")

# What a reader has to do with an input: refuse it; refuse it or read it as the undamaged one; or either, in any way.
REFUSED, SAME, ANY = "refused", "same", "any"


@dataclass(frozen=True)
class MutatedText:
    """A mutated file."""

    name: str
    """The name of the mutation."""
    data: bytes
    expected: str
    """REFUSED, SAME or ANY."""


def mutate_text(rng: Random, name: str, data: bytes) -> MutatedText:
    """Mutate the bytes, the lines or the values of one of TEXT_FILES; a manifest may get a matching sha256 again."""
    if rng.random() < 0.3:
        kind, changed = mutate_bytes(rng, data)
        return MutatedText(kind, changed, SAME if name == MANIFEST else ANY)
    if name not in JSON_FILES:
        kind, changed = mutate_lines(rng, data)
        return MutatedText(kind, changed, ANY)
    kind, values = mutate_values(rng, name, json.loads(data))
    if name == MANIFEST and rng.random() < 0.8:
        return MutatedText(f"{kind}, resealed", to_text(rng, sealed(values)), ANY)
    return MutatedText(kind, to_text(rng, values), SAME if name == MANIFEST else ANY)


# Bytes


def mutate_bytes(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Damage bytes, whatever they mean."""
    begin, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    junk = rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b'"', b"{", b"\\u", b"\\ud800", rng.randbytes(4)))
    ways: dict[str, Callable[[], bytes]] = {
        "bits flipped": lambda: flip_bits(rng, data),
        "truncated": lambda: data[:end],
        "bytes inserted": lambda: data[:end] + junk + data[end:],
        "bytes removed": lambda: data[:begin] + data[end:],
        "bytes repeated": lambda: data[:end] + data[begin:end] + data[end:],
        "byte-order mark": lambda: b"\xef\xbb\xbf" + data,
        "halves swapped": lambda: data[len(data) // 2 :] + data[: len(data) // 2],
        "two parts swapped": lambda: data[end:] + data[begin:end] + data[:begin],
        "UTF-16": lambda: data.decode("utf-8", "replace").encode("utf-16"),
        "CRLF": lambda: data.replace(b"\n", b"\r\n"),
        "junk appended": lambda: data + junk,
    }
    name = rng.choice(list(ways))
    return name, ways[name]()


def flip_bits(rng: Random, data: bytes) -> bytes:
    """Flip one bit, or a few."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


# Lines


def mutate_lines(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Damage the lines of a merges.txt."""
    lines = data.decode().split("\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    line = lines[place]
    new = {
        "line removed": [],
        "line twice": [line, line],
        "line empty": ["", line],
        "line reversed": [" ".join(reversed(line.split(" ")))],
        "line with one word": [line.replace(" ", "")],
        "line with three words": [f"{line} x"],
        "line with a tab": [line.replace(" ", "\t")],
        "line with two spaces": [line.replace(" ", "  ")],
        "line with a space around it": [rng.choice((f" {line}", f"{line} "))],
        "line with foreign letters": [rng.choice(("日 本", "\ue000 \ue001", "a \x1c", "\x85 b", "👩 \u200d", "\0 \0"))],
        "line of known letters": [f"{rng.choice('abcĠÿ!')} {rng.choice('xyzĠĀ~')}"],
        "line of other line ends": [line + rng.choice(("\r", "\r\r", "\u2028", "\x0b", "\x85"))],
        "long line": [rng.choice(("x" * 200_000, "x " * 100_000, " " * 200_000, f"{'a' * 99_999} {'b' * 99_999}"))],
        "line of another version": ["#version: 9", "#version"],
        "other line here": [lines[other]],
        "many lines": [f"a{index} b" for index in range(5000)],
        "many lines that are the same": ["t h"] * 20_000,
    }
    name = rng.choice(list(new))
    return name, "\n".join([*lines[:place], *new[name], *lines[place + 1 :]]).encode()
