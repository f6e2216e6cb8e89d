"""What the end of a process and a fork mean for native code and locks. Knows no model.

Native code that releases the GIL has to take it again. A thread other than the main one cannot do that once the
interpreter is being torn down: Python ends the thread inside the native code, which then ends the process (SIGABRT).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from types import TracebackType

from ortgpt.errors import ClosedError

_running: list[None] = []  # one entry for each native call of any thread; append and pop need no lock
_ending_thread: int | None = None  # the thread that ends the process
_forks = 0  # between the process that imported this module and this one
_reload_lock = threading.Lock()

FORKED = (
    "this generator was loaded in another process; load the bundle in this one, or give load() reload_after_fork = True"
)


class _NativeCall:
    """Marks native code that releases the GIL, so that the process does not end under it.

    Raises SystemExit in a thread that enters while another thread ends the process; that ends the thread silently.
    """

    def __enter__(self) -> None:
        _running.append(None)
        if _ending_thread is not None and _ending_thread != threading.get_ident():
            _running.pop()
            raise SystemExit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.pop()


native_call = _NativeCall()


def forks() -> int:
    """Return how many forks lie between the process that imported this package and this one."""
    return _forks


def reload_lock() -> threading.Lock:
    """Return the lock under which a forked child loads its models again; each process has its own."""
    return _reload_lock


class ProcessLock:
    """A mutex of one process. Raises ClosedError in a forked child, where the thread that holds it may not exist."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forks = _forks

    def __enter__(self) -> None:
        if self._forks != _forks:
            raise ClosedError(FORKED)
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _wait_for_native_calls() -> None:
    global _ending_thread
    _ending_thread = threading.get_ident()
    while _running:
        time.sleep(0.001)


def _begin_in_child() -> None:
    global _forks, _reload_lock
    _forks += 1
    _reload_lock = threading.Lock()
    _running.clear()  # the threads of these calls do not exist here


atexit.register(_wait_for_native_calls)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
