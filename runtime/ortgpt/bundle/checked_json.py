"""Read JSON that came from elsewhere: bounded in size and depth, no NaN, no key twice; and read it into dataclasses.

Every fault of a value is noted, so that one error can name all of them.
"""

from __future__ import annotations

import functools
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ortgpt.bundle.files import read_text
from ortgpt.errors import BundleError, listed, shown

MAX_LEVELS = 100  # far fewer than Python's own limit, which later readers of the values may meet too
_SURROGATE = re.compile(r"\\u[dD]")
_ACCEPTED = {str: "a string", int: "an integer of 0 or more, below 2^63", float: "a number"}

Record = TypeVar("Record")


def read_json_object(path: Path, *, is_flat: bool = False) -> dict[str, Any]:
    """Return the JSON object in the UTF-8 file `path`. Raises BundleError that says what is wrong with it.

    Where all values are integers, as `is_flat` expects, reading takes half the time.
    """
    try:
        text = read_text(path)
        value = _parse_integers(text) if is_flat else None
        if value is None:
            value = parse_json(text)
    except ValueError as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def parse_json(text: str, *, half_characters: bool = False) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for a text that is not JSON, and for NaN, Infinity, a key that occurs twice in an object, more
    than MAX_LEVELS lists and objects inside each other, and, unless allowed, half a character (a lone surrogate).
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_LEVELS and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    if not half_characters and _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a character, which an escape can make
    return value


def _parse_integers(text: str) -> dict[str, int] | None:
    """Return a JSON object of integers as parse_json() does, but None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or {*map(type, value.values())} - {int} or _SURROGATE.search(text):
        return None
    # Its keys are its only strings, so the number of quotes shows whether a key occurs twice.
    quotes = text.count('"') - text.replace("\\\\", "").count('\\"')
    return value if quotes == 2 * len(value) else None


_TOO_DEEP = f"more than {MAX_LEVELS} lists and objects inside each other"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_LEVELS):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"duplicate keys {listed([shown(key) for key in sorted(twice)])}")
    return result


def checked(
    *,
    choices: tuple[str, ...] = (),
    pattern: str = "",
    above_zero: bool = False,
    least_items: int = 0,
    accepted: str = "",
    earlier: str = "",
    default: Any = MISSING,
) -> Any:
    """Declare a field of a dataclass whose value has to fit; `accepted` says what does, where that is a pattern.

    `earlier` is the key that earlier formats had for it.
    """
    metadata = {
        "choices": choices,
        "pattern": re.compile(pattern) if pattern else None,
        "above_zero": above_zero,
        "least_items": least_items,
        "accepted": accepted or ", ".join(choices) or ("a number above 0" if above_zero else ""),
        "earlier": earlier,
    }
    return field(metadata=metadata, default=default)


def read_record(kind: type[Record], values: Any, faults: list[str], prefix: str = "") -> Record:
    """Read a parsed JSON object into a dataclass whose field names are the keys; unknown keys are ignored.

    Field types may be str, int, float, another such dataclass, `X | None`, `tuple[X, ...]` and `Mapping[str, X]`. A key
    may be missing only where its field has a default. What does not fit is noted in `faults` and replaced by a neutral
    value, so the result counts only if no fault was noted.
    """
    found = {}
    if not isinstance(values, Mapping):
        faults.append(_fault(prefix.rstrip("."), values, "an object"))
        values = {}
        faults = []  # its parts are missing, too, which says nothing more
    hints = _hints(kind)  # type: ignore[arg-type]  # a class can be hashed
    for each in fields(kind):  # type: ignore[arg-type]  # a dataclass, which its TypeVar cannot say
        names = (each.name, each.metadata.get("earlier", ""))
        name = next((name for name in names if name in values), each.name)
        if name in values or each.default is MISSING:
            found[each.name] = _read(hints[each.name], values.get(name), faults, prefix + name, each.metadata)
    return kind(**found)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, value: Any, faults: list[str], path: str, metadata: Mapping[str, Any]) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is not None and is_dataclass(inner[0]) and not isinstance(value, Mapping):
            faults.append(_fault(path, value, "an object or null"))
            return None
        if inner[0] in _ACCEPTED:
            metadata = {**metadata, "accepted": f"{metadata.get('accepted') or _ACCEPTED[inner[0]]} or null"}
        return None if value is None else _read(inner[0], value, faults, path, metadata)
    if is_dataclass(hint):
        return read_record(typing.cast("type[Any]", hint), value, faults, f"{path}.")
    if origin is tuple:
        return _read_list(inner[0], value, faults, path, metadata)
    if origin is not None:  # a Mapping
        return _read_mapping(inner[1], value, faults, path)
    return _read_scalar(hint, value, faults, path, metadata)


def _read_list(inner: Any, value: Any, faults: list[str], path: str, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    least = metadata.get("least_items", 0)
    what = "object" if is_dataclass(inner) else {str: "string", int: "integer"}[inner]
    if not isinstance(value, list) or len(value) < least:
        counted = f"at least {least} {what}{'' if least == 1 else 's'}"
        faults.append(_fault(path, value, f"a list with {counted}" if least else f"a list of {what}s"))
        return ()
    if inner is str and not all(isinstance(item, str) for item in value):
        faults.append(_fault(path, value, "a list of strings"))
        return ()
    if inner is int and not all(type(item) is int and 0 <= item < 2**63 for item in value):
        faults.append(_fault(path, value, "a list of integers of 0 or more"))
        return ()
    return tuple(_read(inner, item, faults, f"{path}[{index}]", {}) for index, item in enumerate(value))


def _read_mapping(inner: Any, value: Any, faults: list[str], path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        faults.append(_fault(path, value, "an object"))
        return {}
    if inner is Any:
        return dict(value)
    return {name: _read(inner, item, faults, f"{path}[{shown(name)}]", {}) for name, item in value.items()}


def _read_scalar(kind: type, value: Any, faults: list[str], path: str, metadata: Mapping[str, Any]) -> Any:
    neutral: Any = kind()
    if kind is str:
        fits = isinstance(value, str)
    elif kind is int:
        fits = type(value) is int and 0 <= value < 2**63
    else:
        value, fits = _finite(value)
    if not fits:
        faults.append(_fault(path, value, metadata.get("accepted") or _ACCEPTED[kind]))
        return neutral
    choices, pattern = metadata.get("choices"), metadata.get("pattern")
    if (
        (choices and value not in choices)
        or (pattern and not pattern.fullmatch(value))
        or (metadata.get("above_zero") and not value > 0)
    ):
        faults.append(_fault(path, value, metadata["accepted"]))
        return neutral
    return value


def _finite(value: Any) -> tuple[Any, bool]:
    """Return a number as a float, and whether it is a finite one; anything else as it is."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value, False
    try:
        number = float(value)
    except OverflowError:
        return value, False
    return number, math.isfinite(number)


def _fault(path: str, value: object, accepted: str) -> str:
    return f"{path} = {shown(value)} (accepted: {accepted})"
