"""The rows of a file that a model is evaluated on: JSON lines of one kind, checked before anything is computed.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortgpt.errors import OptionError, PromptError, listed, shown
from ortgpt.options.validation import integer
from ortgpt.task_rows import parse_object, right_choice

MULTIPLE_CHOICE, COMPLETION, LAST_WORD, PERPLEXITY = "multiple-choice", "completion", "last-word", "perplexity"
KINDS = (MULTIPLE_CHOICE, COMPLETION, LAST_WORD, PERPLEXITY)
_KEYS = {"choices": MULTIPLE_CHOICE, "target": COMPLETION, "text": PERPLEXITY}  # what a key says about a row


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a row asks: which of the continuations follows the context."""

    line: int
    """Its line in the file."""
    context: str
    """What comes first; empty for perplexity."""
    continuations: Sequence[str]
    """What may follow, with the delimiter before it; for perplexity the text."""
    choices: Sequence[str]
    """The same without the delimiter."""
    answer: int
    """Which of them is right."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a file, at least one."""

    kind: str
    """One of KINDS."""
    rows: Sequence[Row]
    """The rows, in the order of the file."""


def read_rows(
    text: str, source: str, *, kind: str | None = None, delimiter: str | None = None, limit: int | None = None
) -> Rows:
    """Read the first `limit` rows of JSON lines, by default all; blank lines are skipped.

    The first row says the kind unless `kind` does. `delimiter` is what stands between a context and what follows it, by
    default a space. Raises OptionError, and PromptError that names `source` and each line at fault.
    """
    if kind is not None and kind not in KINDS:
        raise OptionError.bad_value("kind", kind, ", ".join(KINDS))
    limit = integer(1).read("limit", limit)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()][:limit]
    if not lines:
        raise PromptError(f"{source} has no rows (accepted: a JSON object in each line)")
    if kind is None:
        kind = _kind_of(lines[0], source)
    if delimiter is not None and kind in (LAST_WORD, PERPLEXITY):
        raise OptionError(f"{{delimiter}} would have no effect on rows of the kind {kind}", {"delimiter": delimiter})
    rows, faults = [], []
    for number, line in lines:
        try:
            rows.append(_read_row(kind, parse_object(line), number, " " if delimiter is None else delimiter))
        except PromptError as error:
            faults.append((number, str(error)))
    refuse(source, faults, len(lines))
    return Rows(kind=kind, rows=rows)


def refuse(source: str, faults: Sequence[tuple[int, str]], count: int) -> None:
    """Raise PromptError that lists faults by their line, one line of text each, if there are any in `count` rows."""
    if len(faults) == 1:
        raise PromptError(f"{source} line {faults[0][0]}: {faults[0][1]}")
    if faults:
        parts = listed([f"line {number}: {fault}" for number, fault in faults], separator="\n")
        raise PromptError(f"{source}: {len(faults):,} of {count:,} rows are at fault\n{parts}")


def _kind_of(first: tuple[int, str], source: str) -> str:
    """Return the kind of a row by its keys."""
    number, line = first
    accepted = '"choices" for multiple choice, "target" for completion, "text" for perplexity'
    try:
        kinds = [kind for key, kind in _KEYS.items() if key in parse_object(line)]
    except PromptError as error:
        raise error.at(f"{source} line {number}") from None
    if len(kinds) != 1:
        raise PromptError(
            f"{source} line {number} has {'none' if not kinds else 'several'} of the keys that say what kind of rows "
            f"these are ({accepted}); name the kind: {', '.join(KINDS)}"
        )
    return kinds[0]


def _read_row(kind: str, values: Mapping[str, Any], line: int, delimiter: str) -> Row:
    """Return what the values of a line ask. Raises PromptError."""
    if kind == PERPLEXITY:
        text = _text(values, "text")
        return Row(line=line, context="", continuations=[text], choices=[text], answer=0)
    if kind == LAST_WORD:
        context, _, word = _text(values, "text").rpartition(" ")
        if word.split() != [word] or not context.strip():
            raise _bad("text", values["text"], "a last word, with a space before it and no white space after it")
        return Row(line=line, context=context, continuations=[f" {word}"], choices=[word], answer=0)
    context = _text(values, "context", empty=True)
    if kind == COMPLETION:
        choices, answer = [_text(values, "target")], 0
        _check_spaces(context, delimiter, "target", choices[0])
    else:
        choices = _choices(values)
        answer = right_choice(values, choices)
        for place, choice in enumerate(choices):
            _check_spaces(context, delimiter, f"choices[{place}]", choice)
    continuations = [delimiter + choice for choice in choices]
    return Row(line=line, context=context, continuations=continuations, choices=choices, answer=answer)


def _text(values: Mapping[str, Any], key: str, *, empty: bool = False) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not (value or empty):
        if key not in values:
            raise PromptError(f'no "{key}"')
        raise _bad(key, value, "a text" if empty else "a text of at least one character")
    return value


def _choices(values: Mapping[str, Any]) -> list[str]:
    choices = values.get("choices")
    accepted = "a list of at least two texts, none empty, none twice"
    if "choices" not in values:
        raise PromptError(f'no "choices" (accepted: {accepted})')
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
        or len(set(choices)) < len(choices)
    ):
        raise _bad("choices", choices, accepted)
    return choices


def _check_spaces(context: str, delimiter: str, key: str, choice: str) -> None:
    """Refuse a second space beside the delimiter's, which would make a text that the model has hardly seen."""
    if not delimiter.isspace():
        return
    if choice[0].isspace():
        raise PromptError(f"{key} begins with white space, and the delimiter is {delimiter!r}: give an empty delimiter")
    if context[-1:].isspace():
        raise PromptError(f"context ends in white space, and the delimiter is {delimiter!r}: give an empty delimiter")


def _bad(key: str, value: object, accepted: str) -> PromptError:
    return PromptError(f"{key} = {shown(value)} (accepted: {accepted})")
