"""Count the steps of an export, and report each one as it begins."""

from __future__ import annotations

from ortgpt_models.progress import OnProgress, Progress


class Steps:
    """Report the steps of a job, each when it begins; `begun` is how many began before this object was made."""

    def __init__(self, on_progress: OnProgress, total: int, *, begun: int = 0) -> None:
        self._on_progress = on_progress
        self._begun = begun
        self._total = total

    def next(self, activity: str) -> None:
        """Report that the next step begins; `activity` says what it does."""
        self._on_progress(Progress(activity, self._begun, self._total))
        self._begun += 1

    def finish(self) -> None:
        """Report that all steps are done."""
        self._on_progress(Progress("done", self._total, self._total))
