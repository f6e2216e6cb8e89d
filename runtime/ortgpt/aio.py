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
        iterator = _Shared(steps)

        def deliver(put: Callable[[Any], None], value: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(lambda: None if future.done() else put(value))

        def turn() -> None:
            end = time.perf_counter() + _TURN_S
            try:
                item = None
                while item is None and not future.done() and time.perf_counter() < end:
                    item = iterator.step()
                if item is None and not future.done():
                    self._submit(turn)
            except BaseException as error:  # noqa: BLE001  # the caller gets it
                deliver(future.set_exception, error)
            else:
                if item is not None:
                    deliver(future.set_result, item)

        try:
            self._submit(turn)
            return await future
        finally:
            if future.cancelled() or not future.done():
                self._close(iterator)

    async def iterate(self, items: Generator[Item]) -> AsyncGenerator[Item, None]:
        """Yield what an iterator yields; close it when the loop is left or cancelled."""
        iterator = _Shared(items)
        try:
            while (item := await asyncio.wrap_future(self._submit(iterator.step))) is not _END:
                yield item
        finally:
            self._close(iterator)

    def _close(self, iterator: _Shared[Any]) -> None:
        with contextlib.suppress(EngineError):
            self._submit(iterator.close)

    def _submit(self, function: Callable[[], Item]) -> Future[Item]:
        """Let a thread call `function`. Raises EngineError where no thread can be started."""
        try:
            return self._pool.submit(function)
        except RuntimeError as error:
            raise EngineError(f"no thread for an asynchronous call: {error}") from None


class _Shared(Generic[Item]):
    """An iterator whose steps run in several threads, one after another, in the context of its maker."""

    def __init__(self, iterator: Generator[Item]) -> None:
        self._iterator = iterator
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()

    def step(self) -> Item:
        """Return the next item, or _END."""
        with self._lock:
            return self._context.run(next, self._iterator, cast("Item", _END))

    def close(self) -> None:
        """Close the iterator after the step that runs."""
        with self._lock:
            self._context.run(self._iterator.close)
