"""Read JSON that came from elsewhere: of bounded size and depth, no NaN, no Infinity, no key twice."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from ortgpt.errors import BundleError
from ortgpt.files import read_text
from ortgpt.messages import listed, shown

MOST_LEVELS = 100  # far fewer than Python's own limit, which what reads the values may meet, too
_SURROGATE = re.compile(r"\\u[dD]")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the UTF-8 file `path`. Raises BundleError saying what is wrong with it."""
    text = read_text(path)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        if text.count("[") + text.count("{") > MOST_LEVELS and _is_deep(value):
            raise ValueError(f"more than {MOST_LEVELS} lists and objects in each other")
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # half a character, which an escape can make, is none
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_LEVELS):
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
