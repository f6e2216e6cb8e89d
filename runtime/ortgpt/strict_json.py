"""Read JSON that came from elsewhere: bounded in size, no NaN, no Infinity, no key twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from ortgpt.errors import BundleError

MAX_SIZE_BYTES = 64 * 2**20
_SURROGATE = re.compile(r"\\u[dD]")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the UTF-8 file `path`. Raises BundleError saying what is wrong with it."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_SIZE_BYTES:
            raise BundleError(f"{path} has {size_bytes:,} bytes; at most {MAX_SIZE_BYTES:,} are read")
        text = path.read_text(encoding="utf-8")
        hook = _whole_texts if _SURROGATE.search(text) else _unique_keys
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=hook)
    except FileNotFoundError:
        raise BundleError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _whole_texts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As _unique_keys(); half a character, which an escape can make, raises ValueError."""
    "".join(text for pair in pairs for text in pair if isinstance(text, str)).encode()
    return _unique_keys(pairs)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"duplicate keys {twice}")
    return result
