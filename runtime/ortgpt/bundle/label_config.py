"""What the runtime needs of a classifier's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortgpt.contract import FINE_TUNINGS, File, FineTuning, ProblemType, Task
from ortgpt.errors import BundleError, listed, shown

_PROBLEM_TYPES = (ProblemType.REGRESSION, ProblemType.SINGLE_LABEL, ProblemType.MULTI_LABEL)


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """The labels of a classifier, and what their logits mean."""

    labels: tuple[str, ...]
    """The name of each label, in the order of the logits."""
    problem_type: str
    """One of contract.ProblemType; for a label of each token, always one of several labels."""
    finetuning_task: str | None = None
    """One of contract.FineTuning, which says what the classifier reads; None where config.json does not say it."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], task: str) -> LabelConfig:
        """Read a parsed config.json. Raises BundleError that names every value that does not fit."""
        names, problem_type = values.get("id2label"), values.get("problem_type")
        faults = []
        if task == Task.TOKEN_CLASSIFICATION:
            problem_type = ProblemType.SINGLE_LABEL
        elif problem_type not in _PROBLEM_TYPES:
            faults.append(f"problem_type = {shown(problem_type)} (accepted: {', '.join(_PROBLEM_TYPES)})")
        labels: tuple[Any, ...] = ()
        if isinstance(names, Mapping) and names.keys() == {str(index) for index in range(len(names))}:
            labels = tuple(names[str(index)] for index in range(len(names)))
        if not labels or not all(isinstance(label, str) for label in labels) or len(set(labels)) < len(labels):
            faults.append(f"id2label = {shown(names)} (accepted: an object with a name of its own for 0, 1 and so on)")
        # Programs of `transformers` wrote other values, such as "mnli", which say nothing of the input's form.
        named = values.get("finetuning_task") if task == Task.TEXT_CLASSIFICATION else None
        finetuning_task = next((each for each in FINE_TUNINGS if each == named), None)
        if finetuning_task == FineTuning.MULTIPLE_CHOICE and len(labels) > 1:
            faults.append(f"id2label = {shown(names)} (accepted with {finetuning_task}: one name, that of a score)")
        if faults:
            raise BundleError(f"{File.CONFIG} has faults: {listed(faults)}")
        return cls(labels=labels, problem_type=str(problem_type), finetuning_task=finetuning_task)
