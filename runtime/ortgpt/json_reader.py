"""Typed access to parsed JSON, noting every value that does not fit. Knows no file and no key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ortgpt.messages import shown

_SHA256 = re.compile(r"[0-9a-f]{64}")


class JsonReader:
    """Typed access to nested JSON values; what does not fit is noted in `faults` and replaced by a neutral value."""

    def __init__(self, values: Any, prefix: str = "", faults: list[str] | None = None) -> None:
        self.values = values
        self.prefix = prefix
        self.faults: list[str] = [] if faults is None else faults

    def fault(self, key: str, value: object, accepted: str) -> None:
        """Note that the value of a key is not what is accepted."""
        self.faults.append(f"{self.prefix}{key} = {shown(value)} (accepted: {accepted})")

    def _get(self, kind: type | tuple[type, ...], accepted: str, neutral: Any, *keys: str) -> Any:
        value = self.values
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fault(".".join(keys), value, accepted)
            return neutral
        return value

    def text(self, *keys: str) -> str:
        """Return a string."""
        return str(self._get(str, "a string", "", *keys))

    def optional_text(self, *keys: str) -> str | None:
        """Return a string, or None for null."""
        value = self._get((str, type(None)), "a string or null", None, *keys)
        return None if value is None else str(value)

    def integer(self, *keys: str) -> int:
        """Return an integer from 0 to 2^63 - 1."""
        accepted = "an integer of 0 or more, below 2^63"
        value = int(self._get(int, accepted, 0, *keys))
        if not 0 <= value < 2**63:
            self.fault(".".join(keys), value, accepted)
            return 0
        return value

    def number(self, *keys: str) -> float:
        """Return a finite number."""
        value = self._get((int, float), "a number", 0.0, *keys)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            self.fault(".".join(keys), "a number beyond all bounds", "a number")
        return found

    def choice(self, accepted: tuple[str, ...], *keys: str) -> str:
        """Return a string that is one of those accepted."""
        value = self.text(*keys)
        if value and value not in accepted:
            self.fault(".".join(keys), value, ", ".join(accepted))
        return value

    def sha256(self, *keys: str) -> str:
        """Return a sha256 in hexadecimal."""
        value = self.text(*keys)
        if value and not _SHA256.fullmatch(value):
            self.fault(".".join(keys), value, "64 hexadecimal digits")
        return value

    def mapping(self, *keys: str) -> Mapping[str, Any]:
        """Return an object of any values."""
        return dict(self._get(Mapping, "an object", {}, *keys))

    def texts(self, *keys: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._get(list, "a list of strings", [], *keys)
        if not all(isinstance(value, str) for value in values):
            self.fault(".".join(keys), values, "a list of strings")
            return ()
        return tuple(values)

    def readers(self, key: str, *, least: int = 1) -> list[JsonReader]:
        """Return a reader for each object of a list, which note their faults here."""
        accepted = f"a list with at least {least} object{'s' if least != 1 else ''}"
        values = self._get(list, accepted, [], key)
        if len(values) < least and isinstance(self.values.get(key), list):
            self.fault(key, values, accepted)
        return [JsonReader(value, f"{self.prefix}{key}[{index}].", self.faults) for index, value in enumerate(values)]

    def named_readers(self, key: str) -> list[tuple[str, JsonReader]]:
        """Return name and reader of each object in an object, which note their faults here."""
        values = self._get(Mapping, "an object", {}, key)
        return [
            (name, JsonReader(value, f"{self.prefix}{key}[{shown(name)}].", self.faults))
            for name, value in values.items()
        ]
