"""Read the JSON object that a file holds. Knows nothing of what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ortgpt_models.errors import ModelError


def read_json_object(path: Path, expected: str) -> dict[str, Any]:
    """Return the object in `path`; `expected` says what the folder was taken for when the file is missing.

    Raises ModelError when there is no such file, it cannot be read, or is no JSON object in UTF-8.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"no {path.name} in {path.parent}; expected {expected}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}; expected an object")
    return values
