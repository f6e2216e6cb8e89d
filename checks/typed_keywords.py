"""Write runtime/ortgpt/options/keywords.py, the types of the keywords of a generation, from GenerationOptions."""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path

from ortgpt.options.generation_options import OPTIONS, GenerationOptions

TARGET = Path(__file__).parents[1] / "runtime/ortgpt/options/keywords.py"
_HEAD = '''"""The keywords of a generation with their types, for editors and type checkers.

Generated from GenerationOptions by `python checks/typed_keywords.py`; a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ortgpt.options.resolved import Grammar, LogitsProcessor


class GenerationKeywords(TypedDict, total=False):
    """The options of a generation as keywords; None leaves a choice to the bundle, then to the default."""

'''


def module_text() -> str:
    """Return the text of the module."""
    lines = []
    for field in fields(GenerationOptions):
        option = OPTIONS[field.name]
        default = f" Default: {option.default_text}." if option.default_text else ""
        lines.append(f"    {field.name}: {field.type}")
        quote = '"""' if not option.help.startswith('"') else '""" '
        lines += textwrap.wrap(
            f'{quote}{option.help}{default}"""', 120, initial_indent="    ", subsequent_indent="    "
        )
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(module_text(), encoding="utf-8")
