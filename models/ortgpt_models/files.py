"""Check that a file exists, and read the text or the JSON object that it holds. Knows no keys and no values."""

from __future__ import annotations

import codecs
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ortgpt_models.errors import ModelError

# The byte-order marks of encodings that are not UTF-8; that of UTF-32 begins with that of UTF-16.
_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
MAX_JSON_BYTES = 32 * 2**20  # an index of a thousand shards has fewer


def file_is_there(path: Path) -> bool:
    """Tell whether there is a file at `path`. Raises ModelError for a folder, a pipe or a link to nowhere."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        raise ModelError(f"{path} is not a file; remove it, or replace it by the file that its name promises")
    return False


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, each line end as \\n, without a byte-order mark at its beginning.

    Raises ModelError if it is not UTF-8; OSError.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        for mark, encoding in _OTHER_MARKS:
            if data.startswith(mark):
                raise ModelError(
                    f"{path} is {encoding} text by its byte-order mark, not UTF-8; save it as UTF-8, or convert it: "
                    f"iconv -f {encoding} -t UTF-8 OLD > NEW"
                ) from None
        raise ModelError(f"{path} is not UTF-8 text: {error}; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path, expected: str) -> dict[str, Any]:
    """Return the object in `path`; `expected` says what the folder should be, for the error of a missing file.

    Raises ModelError if the file is missing, cannot be read, has more than MAX_JSON_BYTES, or is not a JSON object in
    UTF-8 with unique keys.
    """
    if not file_is_there(path):
        raise ModelError(f"no {path.name} in {path.parent}; expected {expected}")
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {size_bytes:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        values = json.loads(read_text(path), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}; expected an object")
    return values


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(f"the key {twice[0]!r:.80} occurs twice")
    return dict(pairs)
