"""What the runtime needs of a classifier's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortgpt.contract import File, ProblemType, Task
from ortgpt.errors import BundleError, listed, shown

_PROBLEM_TYPES = (ProblemType.REGRESSION, ProblemType.SINGLE_LABEL, ProblemType.MULTI_LABEL)


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """The labels of a classifier, and what their logits mean."""

    labels: tuple[str, ...]
    """The name of each label, in the order of the logits."""
    problem_type: str
    """One of contract.ProblemType; for a label of each token, always one of several labels."""

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
        if faults:
            raise BundleError(f"{File.CONFIG} has faults: {listed(faults)}")
        return cls(labels=labels, problem_type=str(problem_type))
