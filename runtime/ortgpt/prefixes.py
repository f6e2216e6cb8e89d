"""Beginnings of texts that were computed before, with their keys and values, so that none is computed twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ortgpt.cache import Held


class PrefixCache:
    """Texts and what the graph's cache held of them, at most `size_bytes`; the one not used for longest goes first.

    `reused_tokens` counts the tokens that need not be computed so far. Safe to use from several threads.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.reused_tokens = 0
        self._entries: OrderedDict[bytes, tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Held]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Sequence[int]) -> Held | None:
        """Return what is held of the longest beginning of `ids` that was kept, all but its last token at most."""
        array = np.array(ids[:-1], np.int64)
        with self._lock:
            best, most = None, 0
            for key, (kept, _) in self._entries.items():
                count = min(kept.size, array.size)
                same = kept[:count] == array[:count]
                length = count if same.all() else int(same.argmin())
                if length > most:
                    best, most = key, length
            if best is None:
                return None
            self._entries.move_to_end(best)
            self.reused_tokens += most
            return [part[:, :most] for part in self._entries[best][1]]

    def keep(self, ids: Sequence[int], read: Callable[[], Held]) -> None:
        """Keep what `read` returns of `ids`, unless it is held already or too large; what begins it is let go."""
        array = np.array(ids, np.int64)
        with self._lock:
            for key, (kept, _) in self._entries.items():
                if kept.size >= array.size and np.array_equal(kept[: array.size], array):
                    self._entries.move_to_end(key)
                    return
        held = read()
        size = sum(part.nbytes for part in held)
        if not array.size or size > self.size_bytes:
            return
        with self._lock:
            for key, (kept, parts) in list(self._entries.items()):
                if np.array_equal(kept, array[: kept.size]):
                    self._drop(key, parts)
            while self.used_bytes + size > self.size_bytes:
                key = next(iter(self._entries))
                self._drop(key, self._entries[key][1])
            self._entries[array.tobytes()] = (array, held)
            self.used_bytes += size

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._entries.clear()
            self.used_bytes = 0

    def _drop(self, key: bytes, held: Held) -> None:
        del self._entries[key]
        self.used_bytes -= sum(part.nbytes for part in held)
