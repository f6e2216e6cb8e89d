"""Let the process end only when no other thread is in native code. Knows no model.

Native code that releases the GIL has to take it again. While the interpreter is torn down, Python ends every other
thread at that point, inside the native code, and that aborts the process. The exit is one of the whole process, so the
running calls are state of this module.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from types import TracebackType

_running: list[int] = []  # the thread of each native call; append and remove need no lock
_ending_thread: int | None = None  # the thread that ends the process


class _NativeCall:
    """Marks native code that releases the GIL.

    Raises SystemExit in a thread that enters while another one ends the process; that ends the thread silently.
    """

    def __enter__(self) -> None:
        thread = threading.get_ident()
        _running.append(thread)
        if _ending_thread not in (None, thread):
            _running.remove(thread)
            raise SystemExit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.remove(threading.get_ident())


native_call = _NativeCall()


def _wait_for_native_calls() -> None:
    global _ending_thread
    _ending_thread = threading.get_ident()
    # Ctrl-C may have left an entry of this thread, and a thread may have died.
    while {*_running} & (sys._current_frames().keys() - {_ending_thread}):
        time.sleep(0.001)


def _forget_in_child() -> None:
    global _ending_thread
    _ending_thread = None
    _running.clear()  # the threads of these calls do not exist here


atexit.register(_wait_for_native_calls)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
