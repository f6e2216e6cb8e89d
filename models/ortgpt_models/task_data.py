"""The rows of a task as a network reads them: token ids, targets, and what is held out. Knows no text and no file."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ortgpt_models.classifier import MULTIPLE_CHOICE, REGRESSION, SINGLE_LABEL
from ortgpt_models.errors import ModelError

SCORE = "score"  # the name of the only label of a regression, and of multiple choice
_MAX_LABELS = 1000

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Example:
    """One thing to classify."""

    rows: Rows
    """Token ids: one row, both orders of a pair, or one row for each choice."""
    target: int | float
    """The place of its label, or of the right choice; of a regression, the value."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """What to train on and what to measure on."""

    task: str
    """One of classifier.FINE_TUNINGS."""
    labels: tuple[str, ...]
    """The name of each label, in the order of the logits."""
    problem_type: str
    """One of classifier.PROBLEM_TYPES; with multiple choice, the score of each choice is a regression's value."""
    training: tuple[Example, ...]
    """What to train on."""
    held_out: tuple[Example, ...]
    """What to measure on."""
    notes: tuple[str, ...] = ()
    """Facts to tell the user, one line each."""

    @property
    def has_classes(self) -> bool:
        """Whether a target is a place among labels or choices, not a value."""
        return self.task == MULTIPLE_CHOICE or self.problem_type == SINGLE_LABEL

    @property
    def sha256(self) -> str:
        """Digest of all that decides the result: a training resumes only with the same data."""
        parts = [[[each.rows, each.target] for each in part] for part in (self.training, self.held_out)]
        return hashlib.sha256(json.dumps([self.task, self.labels, self.problem_type, parts]).encode()).hexdigest()

    @property
    def baseline(self) -> float:
        """What is reached on the held-out rows without reading them.

        With classes, the share of those whose target is the most frequent one of the training rows; of a regression,
        the mean absolute error of the mean of the training rows.
        """
        targets = [each.target for each in self.training]
        if self.has_classes:
            counts = Counter(targets)
            best = min(counts, key=lambda target: (-counts[target], target))
            return sum(each.target == best for each in self.held_out) / len(self.held_out)
        mean = sum(targets) / len(targets)
        return sum(abs(each.target - mean) for each in self.held_out) / len(self.held_out)


def make_task_data(
    task: str,
    rows: Sequence[tuple[Rows, Any]],
    held_out: Sequence[tuple[Rows, Any]] | None,
    *,
    share: float,
    seed: int,
) -> TaskData:
    """Make the data of a task from rows of ids with their labels.

    A label is a text or an integer, or, if one is a number with a fraction, all are the values of a regression; with
    multiple choice, it is the place of the right choice. Without `held_out`, a `share` of the rows is drawn by `seed`;
    rows with the same ids stay on one side. Raises ModelError for labels of several kinds, a single one, one that only
    the held-out rows have, or too few rows.
    """
    labels, problem_type, read = _label_space(task, [label for _, label in rows])
    examples = [Example(ids, read(label)) for ids, label in rows]
    if held_out is None:
        training, measured = _split(examples, share, seed)
    else:
        training, measured = examples, [Example(ids, read(label)) for ids, label in held_out]
    notes = _notes(examples, training, measured, is_drawn=held_out is None)
    if problem_type == SINGLE_LABEL:
        trained = {example.target for example in training}
        unseen = [label for place, label in enumerate(labels) if place not in trained]
        if len(trained) < 2:
            only = labels[int(training[0].target)]
            raise ModelError(
                f"without the rows held out, all have the label {only!r}; add rows, hold out fewer or take another seed"
            )
        if unseen:
            notes.append(f"labels of which every row is held out, so that none is trained on: {', '.join(unseen)}")
    return TaskData(
        task=task,
        labels=labels,
        problem_type=problem_type,
        training=tuple(training),
        held_out=tuple(measured),
        notes=tuple(notes),
    )


def _label_space(task: str, values: Sequence[Any]) -> tuple[tuple[str, ...], str, Callable[[Any], int | float]]:
    """Return the names of the labels, what they mean, and what turns a label into a target."""
    if task == MULTIPLE_CHOICE:
        return (SCORE,), REGRESSION, int
    kinds = {type(value) for value in values}
    if float in kinds and kinds <= {float, int}:
        if len({float(value) for value in values}) == 1:
            raise ModelError(f"all {len(values):,} rows have the value {values[0]}; add rows with others")
        return (SCORE,), REGRESSION, _value
    if len(kinds) > 1:
        names = sorted({float: "numbers", int: "integers", str: "texts"}[kind] for kind in kinds)
        raise ModelError(f"the labels are {' and '.join(names)} (accepted: texts, integers, or numbers alone)")
    distinct = sorted(set(values))
    if not 2 <= len(distinct) <= _MAX_LABELS:
        what = f"all {len(values):,} rows have the label {distinct[0]!r}"
        raise ModelError(
            f"{what if len(distinct) == 1 else f'there are {len(distinct):,} labels'} (accepted: 2 to {_MAX_LABELS:,} "
            "labels; values with a fraction, such as 3.0, make a regression)"
        )
    place_of = {value: place for place, value in enumerate(distinct)}

    def place(value: Any) -> int:
        if value not in place_of or type(value) is not type(distinct[0]):
            raise ModelError(f"the held-out rows have the label {value!r}, which no row to train on has")
        return place_of[value]

    return tuple(str(value) for value in distinct), SINGLE_LABEL, place


def _value(value: Any) -> float:
    if isinstance(value, str):
        raise ModelError(f"the held-out rows have the label {value!r}, and those to train on have numbers")
    return float(value)


def _split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Draw rows until the held-out share has at least its number; equal rows go together."""
    groups: dict[Rows, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.rows, []).append(example)
    drawn = [*groups.values()]
    random.Random(seed).shuffle(drawn)
    wanted = max(1, round(share * len(examples)))
    held_out: list[Example] = []
    training: list[Example] = []
    for group in drawn:
        (held_out if len(held_out) < wanted else training).extend(group)
    if not training:
        raise ModelError(
            f"{len(examples):,} rows, {len(groups):,} of them different, are too few to hold some out; add rows"
        )
    return training, held_out


def _notes(
    examples: Sequence[Example], training: Sequence[Example], held_out: Sequence[Example], *, is_drawn: bool
) -> list[str]:
    notes = []
    targets: dict[Rows, set[int | float]] = {}
    for example in examples:
        targets.setdefault(example.rows, set()).add(example.target)
    again = len(examples) - len(targets)
    if again:
        split = sum(len(found) > 1 for found in targets.values())
        with_others = f", {split:,} of them with other labels" if split else ""
        notes.append(f"{again:,} of {len(examples):,} rows repeat another{with_others}")
    seen = {each.rows for each in training}
    known = sum(each.rows in seen for each in held_out)
    if known and not is_drawn:
        notes.append(f"{known:,} of {len(held_out):,} held-out rows are among those to train on, too")
    return notes
