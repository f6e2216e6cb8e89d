"""How a message shows what it names: short, whatever it was given. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_LETTERS = 80
_MOST_PARTS = 20


def shown(value: object) -> str:
    """Return a value as a message shows it: as Python writes it, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def listed(parts: Sequence[str]) -> str:
    """Return what a message lists, the first 20 of it and how many more there are."""
    more = len(parts) - _MOST_PARTS
    return "; ".join(parts[:_MOST_PARTS]) + (f"; and {more} more" if more > 0 else "")
