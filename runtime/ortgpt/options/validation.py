"""The rules that values of options follow, and their conversion into Python's own types. Knows no option."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortgpt.errors import OptionError


class NotAcceptedError(ValueError):
    """A converter was given a value that its rule does not accept; Rule.read() turns it into an OptionError."""


@dataclass(frozen=True)
class Rule:
    """What values an option takes."""

    accepted: str
    """What is accepted, as an error says it."""
    convert: Callable[[Any], Any]
    """Returns a value in Python's own types; raises NotAcceptedError."""

    def read(self, name: str, value: Any) -> Any:
        """Return the converted value, None for None. Raises OptionError with option, value and what is accepted."""
        if value is None:
            return None
        try:
            return self.convert(_scalar(value))
        except NotAcceptedError:
            raise OptionError.bad_value(name, value, self.accepted) from None


def number(low: float, high: float, accepted: str) -> Rule:
    """Accept a real number of any type from `low` to `high`; it becomes a float."""

    def convert(value: Any) -> float:
        found = as_float(value)
        if found is None or not low <= found <= high:
            raise NotAcceptedError
        return found

    return Rule(accepted, convert)


def integer(least: int, most: float = math.inf, *, accepted: str = "") -> Rule:
    """Accept an integer of any type from `least` to `most`; it becomes an int."""

    def convert(value: Any) -> int:
        if not is_int(value, least) or value > most:
            raise NotAcceptedError
        return int(value)

    limits = f"an integer of {least} or more" if most == math.inf else f"an integer from {least} to {most}"
    return Rule(accepted or limits, convert)


def boolean() -> Rule:
    """Accept a truth value, numpy's too."""

    def convert(value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise NotAcceptedError
        return bool(value)

    return Rule("true or false", convert)


def choice(*choices: str, accepted: str = "", booleans: bool = False) -> Rule:
    """Accept one of several texts, and with `booleans` a truth value."""

    def convert(value: Any) -> str | bool:
        if booleans and isinstance(value, bool):
            return value
        if not isinstance(value, str) or value not in choices:
            raise NotAcceptedError
        return value

    return Rule(accepted or ", ".join(choices), convert)


def several(accepts: Callable[[Any], bool], accepted: str, *, least: int = 0) -> Rule:
    """Accept one value or an iterable of at least `least` of them; they become a tuple, read once."""

    def convert(value: Any) -> tuple[Any, ...]:
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
        values = tuple(value) if is_list else (value,)
        if len(values) < least or not all(map(accepts, values)):
            raise NotAcceptedError
        return tuple(int(item) if is_int(item, 0) else item for item in values)

    return Rule(f"{accepted}, or a list of such", convert)


def texts() -> Rule:
    """Accept one text or several, none empty."""
    return several(is_text, "a text of at least one character, in whole characters")


def token_ids() -> Rule:
    """Accept one token id or several."""
    return several(lambda value: is_int(value, 0), "a token id")


def seeds() -> Rule:
    """Accept one seed, which becomes an int, or a list with one for each row, which becomes a tuple."""
    one, many = integer(0), several(lambda value: is_int(value, 0), "", least=1)

    def convert(value: Any) -> int | tuple[int, ...]:
        found: int | tuple[int, ...] = (one if isinstance(value, numbers.Integral) else many).convert(value)
        return found

    return Rule("an integer of 0 or more, or a list with one for each row", convert)


def words() -> Rule:
    """Accept a text, or a list of texts and of sequences of token ids, none empty; they become a tuple."""

    def convert(value: Any) -> tuple[str | tuple[int, ...], ...]:
        is_one = isinstance(value, str) or not isinstance(value, Iterable)
        return tuple(word(item) for item in ([value] if is_one else value))

    def word(item: Any) -> str | tuple[int, ...]:
        if isinstance(item, str) or not isinstance(item, Iterable):
            if not is_text(item):
                raise NotAcceptedError
            return str(item)
        ids = tuple(item)
        if not ids or not all(is_int(token_id, 0) for token_id in ids):
            raise NotAcceptedError
        return tuple(int(token_id) for token_id in ids)

    return Rule("a text, or a list of texts or of sequences of token ids, none of them empty", convert)


def biases() -> Rule:
    """Accept a mapping from token ids to numbers; it becomes a dict."""

    def convert(value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise NotAcceptedError
        found = {}
        for token_id, bias in value.items():
            amount = as_float(bias)
            if not is_int(token_id, 0) or amount is None or not (abs(amount) <= 1e30 or amount == -math.inf):
                raise NotAcceptedError
            found[int(token_id)] = amount
        return found

    return Rule("a mapping from token ids to numbers from -1e30 to 1e30, or -inf", convert)


def grammar() -> Rule:
    """Accept a regular expression, a JSON schema (a mapping), or a list of choices, which becomes a tuple."""
    choices = several(is_text, "", least=1)

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return value
        if isinstance(value, str):
            if not is_text(value):
                raise NotAcceptedError
            return value
        return choices.convert(value)

    return Rule("a regular expression, a JSON schema, or a list of choices, in whole characters", convert)


def having(attribute: str, accepted: str, *, method: bool = False) -> Rule:
    """Accept an object, and not a class, that has this attribute; with `method`, one that can be called."""

    def convert(value: Any) -> Any:
        found = None if isinstance(value, type) else getattr(value, attribute, None)
        if found is None or (method and not callable(found)):
            raise NotAcceptedError
        return value

    return Rule(accepted, convert)


def as_float(value: object) -> float | None:
    """Return a real number as a float; None for anything else, and for a number that no float holds."""
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_int(value: object, least: int) -> bool:
    """Tell whether a value is an integer of at least `least`, and not a truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_text(value: object) -> bool:
    """Tell whether a value is a text of at least one character, each of them whole."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character (a lone surrogate), which no generated text can contain
        return False
    return True


def _scalar(value: Any) -> Any:
    """Return what an array without axes holds; anything else as it is."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
