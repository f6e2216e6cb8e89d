"""The rows of a file of tasks: which keys of a JSON object are a text, a pair of texts, or a context with choices.

Knows no model, and does not judge what the keys hold beyond its form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortgpt.bundle.checked_json import parse_json
from ortgpt.errors import PromptError, shown

TEXT_KEYS = ("text", "prompt")
PAIR_KEYS = (("text", "text_pair"), ("premise", "hypothesis"), ("sentence1", "sentence2"))
CHOICE_KEYS = ("context", "choices")
LABEL, ANSWER = "label", "answer"

_FORMS = (
    'an object with "text" (or "prompt"); with "text" and "text_pair", "premise" and "hypothesis", or "sentence1" and '
    '"sentence2"; or with "context" and "choices"'
)


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """What a row asks about."""

    text: Any = None
    """The value of the text; of a pair, a tuple of both values; None for choices."""
    context: Any = None
    """The value of the context, if the row has choices."""
    choices: Any = None
    """The value of the choices, if it has any."""
    keys: tuple[str, ...]
    """The keys that were read, in order."""
    rest: Mapping[str, Any] = field(default_factory=dict)
    """The other keys with their values: a label, or the row's own id."""

    @property
    def is_pair(self) -> bool:
        """Whether it has two texts."""
        return isinstance(self.text, tuple)

    @property
    def has_choices(self) -> bool:
        """Whether it has a context with choices."""
        return self.keys == CHOICE_KEYS


def parse_object(line: str) -> dict[str, Any]:
    """Return the object in a line of JSON. Raises PromptError."""
    try:
        value = parse_json(line)
    except ValueError as error:
        raise PromptError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PromptError(f"{shown(value)} (accepted: a JSON object)")
    return value


def right_choice(values: Mapping[str, Any], choices: Sequence[str]) -> int:
    """Return the place of the choice that the answer in `values` names, by place or by text. Raises PromptError."""
    answer = values.get(ANSWER)
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    what = f"{ANSWER} = {shown(answer)}" if ANSWER in values else f'no "{ANSWER}"'
    raise PromptError(f"{what} (accepted: an integer from 0 to {len(choices) - 1}, or the text of a choice)")


def read_row(value: Mapping[str, Any]) -> TaskRow:
    """Return what an object asks about. Raises PromptError for one that has the keys of no form, or of several."""
    found: list[tuple[str, ...]] = [keys for keys in (*PAIR_KEYS, CHOICE_KEYS) if keys[0] in value and keys[1] in value]
    of_pairs = {key for keys in found for key in keys}
    found += [(key,) for key in TEXT_KEYS if key in value and key not in of_pairs]
    known = {key for keys in (*PAIR_KEYS, CHOICE_KEYS) for key in keys}
    if len(found) != 1 or (known & value.keys()) - {*found[0]}:
        has = [key for key in (*TEXT_KEYS, *sorted(known - {*TEXT_KEYS})) if key in value]
        what = "no text" if not has else f"{has[0]} alone" if len(has) == 1 else f"{', '.join(has)} together"
        raise PromptError(f"{what} (accepted: {_FORMS})")
    (keys,) = found
    rest = {key: each for key, each in value.items() if key not in keys}
    if keys == CHOICE_KEYS:
        return TaskRow(context=value[keys[0]], choices=value[keys[1]], keys=keys, rest=rest)
    values = tuple(value[key] for key in keys)
    return TaskRow(text=values if len(keys) == 2 else values[0], keys=keys, rest=rest)
