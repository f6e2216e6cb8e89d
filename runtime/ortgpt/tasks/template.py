"""Texts with named fields: {name} stands for a field, {{ and }} for braces. Knows no form."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

ACCEPTED = "a text with fields such as {text}; {{ and }} stand for braces"


@dataclass(frozen=True)
class Template:
    """A text with fields, as its parts: a text, and the field after it, None at the end."""

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Read a template. Raises ValueError, which says what is wrong, for a lone brace or a field that is no name."""
        parts = []
        for literal, name, spec, conversion in string.Formatter().parse(text):
            if name is not None and (spec or conversion or not name.isidentifier()):
                whole = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                raise ValueError(f"the field {{{whole}}} is not a name of letters, digits and _")
            parts.append((literal, name))
        return cls(tuple(parts))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, each once, in order."""
        return tuple(dict.fromkeys(name for _, name in self.parts if name is not None))

    def render(self, values: Mapping[str, str]) -> str:
        """Return the text with each field's value in its place; braces in a value stay as they are."""
        return "".join(literal + ("" if name is None else values[name]) for literal, name in self.parts)
