"""Progress of a long job: what is being done, and how much of it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What is being done now, and how many of the steps are done."""

    activity: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


class Steps:
    """Counts the steps of a job as they begin; `begun` of them have before it is made."""

    def __init__(self, on_progress: OnProgress, total: int, *, begun: int = 0) -> None:
        self._on_progress = on_progress
        self._begun = begun
        self._total = total

    def next(self, activity: str) -> None:
        self._on_progress(Progress(activity, self._begun, self._total))
        self._begun += 1

    def finish(self) -> None:
        self._on_progress(Progress("done", self._total, self._total))
