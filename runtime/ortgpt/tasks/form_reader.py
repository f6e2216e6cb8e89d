"""Read the tables of a TOML file strictly: every fault is noted, so that one error can name all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ortgpt.errors import OptionError, shown
from ortgpt.options.generation_options import OPTIONS, GenerationOptions
from ortgpt.options.names import did_you_mean


class Table:
    """A table: what is taken from it by key is checked; what is not taken, refuse_others() notes."""

    def __init__(self, values: Mapping[str, Any], faults: list[str], place: str = "") -> None:
        self.values = values
        self._faults = faults
        self._place = place
        self._taken: list[str] = []

    def has(self, key: str) -> bool:
        """Tell whether the key is there; it is one that the table may have."""
        self._taken.append(key)
        return key in self.values

    def fault(self, key: str, what: str) -> None:
        """Note a fault of a key's value, or, for an empty key, of the table itself."""
        self._faults.append(f"{self._name(key)}: {what}" if key else f"{self._place} {what}")

    def text(self, key: str, accepted: str, *, may_be_empty: bool = False) -> str:
        """Return a text, which must be there."""
        value = self._take(key)
        if isinstance(value, str) and (value or may_be_empty):
            return value
        self._refuse(key, accepted)
        return ""

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, none empty; without the key, none."""
        value = self._take(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(value)
        self._refuse(key, "a list of texts, none of them empty")
        return ()

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """Return one of `choices`, which must be there; "" for anything else."""
        value = self._take(key)
        if isinstance(value, str) and value in choices:
            return value
        self._refuse(key, ", ".join(choices))
        return ""

    def count(self, key: str, *, default: int) -> int:
        """Return an integer of 1 or more."""
        value = self._take(key)
        if value is None:
            return default
        if type(value) is int and value >= 1:
            return value
        self._refuse(key, "an integer of 1 or more")
        return default

    def table(self, key: str, *, required: bool) -> Table:
        """Return a table inside this one; an empty one, whose own faults do not count, in place of another value."""
        value = self._take(key)
        if isinstance(value, Mapping):
            return Table(value, self._faults, self._name(key))
        if value is not None or required:
            self._refuse(key, "a table")
        return Table({}, [], self._name(key))

    def tables(self, key: str, accepted: str) -> list[Table]:
        """Return the tables of a list, which must hold at least one."""
        value = self._take(key)
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            return [Table(item, self._faults, f"{self._name(key)}[{place}]") for place, item in enumerate(value)]
        self._refuse(key, accepted)
        return []

    def refuse_others(self) -> None:
        """Note the keys that nobody took."""
        for key in self.values:
            if key not in self._taken:
                accepted = ", ".join(dict.fromkeys(self._taken))
                self._faults.append(f"unknown key {self._name(key)} (accepted: {accepted})")

    def _take(self, key: str) -> Any:
        self._taken.append(key)
        return self.values.get(key)

    def _refuse(self, key: str, accepted: str) -> None:
        state = f"= {shown(self.values[key])}" if key in self.values else "is missing"
        self._faults.append(f"{self._name(key)} {state} (accepted: {accepted})")

    def _name(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key


def read_options(table: Table, accepted: Iterable[str], faults: list[str]) -> GenerationOptions:
    """Return the generation options of a table. What is wrong with one, or with all together, is noted."""
    names, good = tuple(accepted), {}
    for name, value in table.values.items():
        if name not in OPTIONS:
            faults.append(
                f"options.{name} is not an option{did_you_mean([name], {each: OPTIONS[each] for each in names})}"
            )
        elif name not in names:
            faults.append(f"options.{name} would have no effect (accepted: {', '.join(names)})")
        else:
            try:
                good[name] = OPTIONS[name].rule.read(name, value)
            except OptionError as error:
                faults.append(f"options.{error}")
    options = GenerationOptions(**good)
    if len(good) == len(table.values):
        try:
            # Stand-ins for what the model will say: the ids of texts, and of an end-of-text.
            options.resolve(GenerationOptions(eos_token_id=0), lambda text: (0,))
        except OptionError as error:
            faults.append(f"options: {error}")
    return options
