"""Work in threads for asyncio: the event loop goes on meanwhile, and cancelling ends it after the step in hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_END = object()


async def iterate_in_thread(items: Iterator[Item]) -> AsyncIterator[Item]:
    """Yield what a generator yields, each item computed in a thread; close it when the loop is left or cancelled."""
    running: asyncio.Future[Any] | None = None
    try:
        while True:
            running = asyncio.ensure_future(asyncio.to_thread(next, items, _END))
            item = await asyncio.shield(running)
            running = None
            if item is _END:
                return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            if running is None or running.done():
                close()
            else:  # cancelled in the middle of a step, which cannot be stopped: close as soon as it is done
                running.add_done_callback(lambda _: close())


async def run_to_end(function: Callable[..., Result], prompt: Any, options: Any, keywords: Mapping[str, Any]) -> Result:
    """Run a generation in a thread; where the task is cancelled, it ends within a step."""
    cancelled = _Either(keywords.get("cancel") or getattr(options, "cancel", None))
    try:
        return await asyncio.to_thread(function, prompt, options, **{**keywords, "cancel": cancelled})
    except asyncio.CancelledError:
        cancelled.own.set()
        raise


class _Either:
    """An event that is set when its own is, or the caller's."""

    def __init__(self, other: Any) -> None:
        self.own = threading.Event()
        self._other = other

    def is_set(self) -> bool:
        return self.own.is_set() or (self._other is not None and self._other.is_set())
