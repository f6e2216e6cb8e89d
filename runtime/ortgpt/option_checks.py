"""What values an option takes: checked when options are made, and turned into Python's own types. Knows no option."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ortgpt.errors import OptionError
from ortgpt.messages import shown

Accepts = Callable[[Any], bool]


def check(name: str, value: object, good: bool, accepted: str) -> None:
    """Raise OptionError naming option, value and what is accepted, unless `good` or unset."""
    if value is not None and not good:
        raise OptionError(f"{name} = {shown(value)} (accepted: {accepted})")


def read_number(name: str, value: Any, low: float, high: float, accepted: str) -> float | None:
    """Turn any kind of real number, numpy's included, into a float from `low` to `high`."""
    number = as_float(_single(value))
    check(name, value, number is not None and low <= number <= high, accepted)
    return number


def read_integer(name: str, value: Any, least: int, accepted: str, most: float = math.inf) -> int | None:
    """Turn any kind of integer, numpy's included, into an int from `least` to `most`."""
    value = _single(value)
    check(name, value, is_int(value, least) and value <= most, accepted)
    return None if value is None else int(value)


def read_tuple(name: str, value: Any, accepts: Accepts, accepted: str, least: int = 0) -> tuple[Any, ...] | None:
    """Turn a single value or an iterable of at least `least` of them into a tuple, each value checked."""
    value = _single(value)
    if value is None:
        return None
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    values = tuple(value) if several else (value,)
    check(name, value, len(values) >= least and all(map(accepts, values)), f"{accepted}, or a list of such")
    return tuple(int(item) if is_int(item, 0) else item for item in values)


def read_bool(name: str, value: Any) -> bool | None:
    """Turn a truth value, numpy's included, into a bool."""
    value = _single(value)
    check(name, value, isinstance(value, (bool, np.bool_)), "true or false")
    return None if value is None else bool(value)


def read_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...] | None:
    """Turn a text, or a list of texts and of sequences of ids, into a tuple."""
    value = _single(value)
    if value is None:
        return None
    single = isinstance(value, str) or not isinstance(value, Iterable)
    words = [value] if single else list(value)
    found: list[str | tuple[int, ...]] = []
    for word in words:
        ids = () if isinstance(word, str) or not isinstance(word, Iterable) else tuple(word)
        good = is_text(word) or (ids != () and all(is_int(each, 0) for each in ids))
        check(name, value, good, "a text, or a list of texts or of sequences of token ids, none of them empty")
        found.append(word if isinstance(word, str) else tuple(int(each) for each in ids))
    return tuple(found)


def read_bias(name: str, value: Any) -> dict[int, float] | None:
    """Turn a mapping from token ids to numbers into a dict."""
    if value is None:
        return None
    good = isinstance(value, Mapping) and all(is_int(key, 0) for key in value)
    numbers_of = {int(key): as_float(each) for key, each in value.items()} if good else {}
    good = good and all(each is not None and (abs(each) <= 1e30 or each == -math.inf) for each in numbers_of.values())
    check(name, value, good, "a mapping from token ids to numbers from -1e30 to 1e30, or -inf")
    return {key: float(each) for key, each in numbers_of.items() if each is not None}


def as_float(value: object) -> float | None:
    """Return a real number as a float; None for what is none, and for what no float holds."""
    if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_int(value: object, least: int) -> bool:
    """Tell whether a value is an integer of at least `least`, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def is_text(value: object) -> bool:
    """Tell whether a value is a text of at least one character, each of them whole."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character, which no text that is generated can have
        return False
    return True


def _single(value: Any) -> Any:
    """Return what an array without axes holds; anything else as it is."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
