"""Let the process fork and end only when no other thread is in native code or imports a module. Knows no model.

Native code that releases the GIL has to take it again. While the interpreter is torn down, Python ends every other
thread at that point, inside the native code, and that aborts the process. A forked child has no other thread, so what
one of them had locked, in native code or for an import, stays locked there. Both concern the whole process, so the
running calls are state of this module.
"""

from __future__ import annotations

import atexit

# Both hold a lock of their own while the process forks. What is registered last is called first, so they come before
# this module: a fork that has their lock must not wait for a native call that needs it.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import sys
import threading
import time
from types import TracebackType

_WAIT_S = 0.0005

_running: list[int] = []  # the thread of each native call; append and remove need no lock
_ending_thread: int | None = None  # the thread that ends the process
_forking_thread: int | None = None
_fork_lock = threading.Lock()  # one fork at a time


class _NativeCall:
    """Marks native code that releases the GIL, and imports of modules on first use.

    A thread that enters while another one forks waits. One that enters while another one ends the process gets
    SystemExit, which ends the thread silently.
    """

    def __enter__(self) -> None:
        thread = threading.get_ident()
        while True:
            _running.append(thread)
            if _ending_thread in (None, thread) and _forking_thread in (None, thread):
                return
            _running.remove(thread)
            if _ending_thread not in (None, thread):
                raise SystemExit
            time.sleep(_WAIT_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.remove(threading.get_ident())


native_call = _NativeCall()


def _wait_for_others() -> None:
    """Wait until no other thread is in a native call."""
    own = threading.get_ident()
    # Ctrl-C may have left an entry of this thread, and a thread may have died.
    while {*_running} & (sys._current_frames().keys() - {own}):
        time.sleep(_WAIT_S)


def _end() -> None:
    global _ending_thread
    _ending_thread = threading.get_ident()
    _wait_for_others()


def _begin_fork() -> None:
    global _forking_thread
    _fork_lock.acquire()
    _forking_thread = threading.get_ident()
    _wait_for_others()


def _end_fork_in_parent() -> None:
    global _forking_thread
    _forking_thread = None
    _fork_lock.release()


def _end_fork_in_child() -> None:
    global _ending_thread, _forking_thread, _fork_lock
    _ending_thread = _forking_thread = None
    _fork_lock = threading.Lock()
    _running.clear()  # the threads of these calls do not exist here


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork_in_parent, after_in_child=_end_fork_in_child)
