"""What a fork leaves of a process: no thread but one, and locks that nobody will release. Knows no model.

How many forks lie behind a process is a fact of the whole process, so it is state of this module.
"""

from __future__ import annotations

import os
import threading

from ortgpt.errors import ClosedError

FORKED = (
    "this generator was loaded in another process; load the bundle in this one, or pass reload_after_fork=True to "
    "load()"
)

_count = 0
_lock = threading.Lock()


def fork_count() -> int:
    """Return how many forks lie between the process that imported this package and this one."""
    return _count


def process_lock() -> threading.Lock:
    """Return the lock of this process; a forked child has a new one."""
    return _lock


class ProcessLock:
    """A mutex of one process. Raises ClosedError in a forked child, where the thread that holds it may not exist."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fork_count = _count

    def here(self) -> threading.Lock:
        """Return the lock, for a `with` statement: its own methods, unlike ones in Python, cannot be interrupted."""
        if self._fork_count != _count:
            raise ClosedError(FORKED)
        return self._lock


def _begin_in_child() -> None:
    global _count, _lock
    _count += 1
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
