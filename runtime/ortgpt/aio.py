"""Run calls for asyncio in a few threads of their own. Calls take turns, so none waits until another has ended."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

from ortgpt.errors import EngineError
from ortgpt.forks import fork_count

Item = TypeVar("Item")
Result = TypeVar("Result")

_END = object()
_TURN_S = 0.01  # of a call, before the others that wait have theirs


class Turns:
    """At most `threads` threads, which the calls of all event loops share.

    The event loop's default executor is the application's: long calls there would block name lookups and `to_thread`.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "ortgpt")
        self.fork_count = fork_count()
        """That of the process that the threads belong to."""

    async def result(self, steps: Generator[Result | None]) -> Result:
        """Run an iterator until it yields a result, and return that. Cancelling the task ends it within a step."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        iterator, in_daemon = _Shared(steps), threading.current_thread().daemon

        def deliver(put: Callable[[Any], None], value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(lambda: None if future.done() else put(value))

        def turn() -> None:
            try:
                item = iterator.turn(lambda: future.done() or loop.is_closed())
                if item is None:
                    self._submit(turn, in_daemon=in_daemon)
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                deliver(future.set_exception, error)
            else:
                if item is not None:
                    deliver(future.set_result, item)

        try:
            self._submit(turn, in_daemon=in_daemon)
            return await future
        finally:
            if future.cancelled() or not future.done():
                self._close(iterator)

    async def iterate(self, items: Generator[Item | None]) -> AsyncGenerator[Item, None]:
        """Yield what an iterator yields besides None; close it when the loop is left or cancelled."""
        iterator, in_daemon = _Shared(items), threading.current_thread().daemon
        try:
            while (item := await asyncio.wrap_future(self._submit(iterator.turn, in_daemon=in_daemon))) is not _END:
                if item is not None:
                    yield item
        finally:
            self._close(iterator)

    def _close(self, iterator: _Shared[Any]) -> None:
        with contextlib.suppress(EngineError):
            self._submit(iterator.close, in_daemon=True)

    def _submit(self, function: Callable[[], Item], *, in_daemon: bool) -> Future[Item]:
        """Let a thread call `function` for an event loop, perhaps in a daemon thread.

        Raises EngineError where no thread can be started.
        """
        try:
            return self._pool.submit(function)
        except RuntimeError as error:
            if "shutdown" in str(error) and in_daemon:
                return Future()  # never done: the process ends, and kills the loop's thread as it waits
            raise EngineError(f"no thread for an asynchronous call: {error}") from None


class _Shared(Generic[Item]):
    """An iterator whose steps run in several threads, one after another, in the context of its maker."""

    def __init__(self, iterator: Generator[Item]) -> None:
        self._iterator = iterator
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()

    def turn(self, is_unwanted: Callable[[], bool] = lambda: False) -> Item | None:
        """Return the next item that is not None, or _END; None after a while. Unwanted, it ends: _END."""
        end = time.perf_counter() + _TURN_S
        item, ended = cast("Item | None", None), cast("Item", _END)
        with self._lock:
            while item is None and time.perf_counter() < end:
                item = ended if is_unwanted() else self._context.run(next, self._iterator, ended)
        return item

    def close(self) -> None:
        """Close the iterator after the step that runs."""
        with self._lock:
            self._context.run(self._iterator.close)
