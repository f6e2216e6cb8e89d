"""A job beside its caller that can be stopped. Knows no bundle and no model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar

Result = TypeVar("Result")

_START_S = 1  # a thread that has not begun by then was interrupted before it existed


class Background(Generic[Result]):
    """A job that runs in a thread of its own while its `with` block lives, or at once if no thread can be started.

    If an exception leaves the block, Ctrl-C for one, `stop` is called, which lets the job end early. The block waits
    for its end. An executor would wait for the whole job, there and again where the interpreter ends.
    """

    def __init__(self, job: Callable[[], Result], *, stop: Callable[[], None], daemon: bool) -> None:
        """Take the job. Python kills a daemon at exit, and C++ code aborts then, so no daemon runs such code."""
        self._job, self._stop = job, stop
        self._future: Future[Result] = Future()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=daemon)

    def result(self) -> Result:
        """Wait for the job, and return what it returned or raise what it raised."""
        return self._future.result()

    def __enter__(self) -> Self:
        assert self._thread is not None, "it begins once"
        try:
            self._thread.start()
        except RuntimeError:  # the limit of threads is reached
            self._thread = None
            self._run()
            error = self._future.exception()
            if error is not None and not isinstance(error, Exception):  # Ctrl-C is for this thread
                raise error from None
        except BaseException:  # Ctrl-C while the thread starts
            self._stop()
            self._join_half_started(self._thread)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stop()
        if self._thread is not None:
            self._thread.join()

    @staticmethod
    def _join_half_started(thread: threading.Thread) -> None:
        """Wait for the end of a thread whose start was interrupted, at whatever point."""
        deadline = time.monotonic() + _START_S
        while thread.ident is None and thread in threading.enumerate() and time.monotonic() < deadline:
            time.sleep(0.001)
        if thread.ident is not None:
            thread.join()

    def _run(self) -> None:
        try:
            self._future.set_result(self._job())
        except BaseException as error:  # noqa: BLE001  # result() raises it in the caller's thread
            self._future.set_exception(error)
