"""How many threads this process may start: ONNX Runtime hangs where it cannot start all threads of its pool."""

from __future__ import annotations

import logging
import os
import threading
import time

from ortgpt.errors import OptionError

_END_OF_THREADS_S = 0.5
_logger = logging.getLogger("ortgpt")


def pool_size(threads: int | None, count: int) -> int:
    """Return how many of `count` threads the pool may have, with the one that calls it.

    Raises OptionError if the caller asked for more `threads`.
    """
    startable = 1 + startable_threads(count - 1)
    if startable < count:
        limit = (
            f"at most {startable} now: the control group (pids.max), the user's limit (ulimit -u) or memory lets this "
            f"process start {startable - 1} more"
        )
        if threads is not None:
            raise OptionError.bad_value("threads", threads, limit)
        _logger.warning("the pool has %d of %d threads (%s)", startable, count, limit)
    return startable


def startable_threads(most: int) -> int:
    """Return how many threads this process may start now, at most `most`, found out by starting them."""
    before, release = _running_threads(), threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(most)]
    started = 0
    try:
        for thread in threads:
            thread.start()
            started += 1
    except RuntimeError:  # the limit
        pass
    finally:
        release.set()
    for thread in threads[:started]:
        thread.join()
    # The system counts a thread a little longer than Python does.
    deadline = time.monotonic() + _END_OF_THREADS_S
    while _running_threads() > before and time.monotonic() < deadline:
        time.sleep(0.0002)
    return started


def _running_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
