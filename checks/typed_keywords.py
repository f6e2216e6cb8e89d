"""Write runtime/ortgpt/options/keywords.py, the types of the keywords of a generation, from GenerationOptions."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ortgpt.options.generation_options import GenerationOptions

TARGET = Path(__file__).parents[1] / "runtime/ortgpt/options/keywords.py"
_HEAD = '''"""The keywords of a generation with their types, for editors and type checkers.

Generated from GenerationOptions by `python checks/typed_keywords.py`; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ortgpt.options.resolved import Grammar, LogitsProcessor


class GenerationKeywords(TypedDict, total=False):
    """The options of a generation as keywords; GenerationOptions says what each does."""

'''


def module_text() -> str:
    """Return the text of the module."""
    return _HEAD + "".join(f"    {field.name}: {field.type}\n" for field in fields(GenerationOptions))


if __name__ == "__main__":
    TARGET.write_text(module_text(), encoding="utf-8")
