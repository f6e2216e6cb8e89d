"""Run calls in threads for asyncio: the event loop goes on meanwhile, and cancelling ends a call after its step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_END = object()


async def iterate_in_thread(begin: Callable[[], Iterator[Item]]) -> AsyncGenerator[Item, None]:
    """Yield what an iterator yields, made and read in a thread; close it when the loop is left or cancelled."""
    pool = ThreadPoolExecutor(1)  # one thread, so that closing waits for the step that runs
    items: list[Iterator[Item]] = []

    def step() -> Any:
        if not items:
            items.append(begin())
        return next(items[0], _END)

    def close() -> None:
        for each in items:
            getattr(each, "close", lambda: None)()

    try:
        while (item := await asyncio.wrap_future(pool.submit(step))) is not _END:
            yield item
    finally:
        pool.submit(close)
        pool.shutdown(wait=False)


async def run_to_end(function: Callable[[Any], Result], cancel: Any) -> Result:
    """Run `function` of an event in a thread; cancelling the task, or the caller's event, sets that event."""
    either = _Either(cancel)
    try:
        return await asyncio.to_thread(function, either)
    except asyncio.CancelledError:
        either.own.set()
        raise


class _Either:
    """An event that is set when its own is, or the caller's."""

    def __init__(self, other: Any) -> None:
        self.own = threading.Event()
        self._other = other

    def is_set(self) -> bool:
        return self.own.is_set() or (self._other is not None and self._other.is_set())
