"""What a long job reports while it runs: downloads, training, export. Imports no other module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """One report of a job: what it does now, and how much of the job is done."""

    activity: str
    """The work that goes on now, in a few words, such as "loss 3.218" or "downloading me/gpt, 498.0 MB"."""
    done: int
    """The units done so far: steps of a training or an export, bytes of a download."""
    total: int
    """The units of the whole job."""


OnProgress = Callable[[Progress], None]
