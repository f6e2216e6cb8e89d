"""Beginnings of texts that were computed before, with their keys and values, so that none is computed twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ortgpt.engine.kv_cache import Cache, RowKV


class PrefixCache:
    """Texts with their keys and values, at most `size_bytes`; the one that was not used for longest goes first.

    Safe to use from several threads.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        """The most that it holds, in bytes."""
        self.used_bytes = 0
        """What it holds now, in bytes."""
        self.reused_tokens = 0
        """How many tokens were taken from it so far."""
        self._entries: OrderedDict[bytes, tuple[np.ndarray[tuple[int], np.dtype[np.int64]], RowKV]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Sequence[int]) -> RowKV | None:
        """Return the keys and values of the longest known beginning of `ids`, at most of all but the last token."""
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

    def keep(self, ids: Sequence[int], read: Callable[[], RowKV]) -> None:
        """Keep the keys and values of `ids` that `read` returns, unless they are known or too large.

        An entry that is a beginning of `ids` is dropped.
        """
        array = np.array(ids, np.int64)
        with self._lock:
            for key, (kept, _) in self._entries.items():
                if kept.size >= array.size and np.array_equal(kept[: array.size], array):
                    self._entries.move_to_end(key)
                    return
        row_kv = read()
        size = sum(part.nbytes for part in row_kv)
        if not array.size or size > self.size_bytes:
            return
        with self._lock:
            for key, (kept, parts) in list(self._entries.items()):
                if np.array_equal(kept, array[: kept.size]):
                    self._drop(key, parts)
            while self.used_bytes + size > self.size_bytes:
                key = next(iter(self._entries))
                self._drop(key, self._entries[key][1])
            self._entries[array.tobytes()] = (array, row_kv)
            self.used_bytes += size

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()
            self.used_bytes = 0

    def _drop(self, key: bytes, row_kv: RowKV) -> None:
        del self._entries[key]
        self.used_bytes -= sum(part.nbytes for part in row_kv)


def load_prefixes(prefixes: PrefixCache | None, cache: Cache, texts: Sequence[Sequence[int]]) -> None:
    """Load into each row of an empty cache what is known of the beginning of its text; leave any other cache."""
    if prefixes is not None and not cache.lengths.any():
        cache.load_rows([prefixes.find(ids) for ids in texts])


def keep_prefix(prefixes: PrefixCache | None, ids: Sequence[int], cache: Cache, row: int) -> None:
    """Keep the keys and values of a row that ended, whose tokens are `ids`."""
    if prefixes is not None:
        prefixes.keep(ids[: int(cache.lengths[row])], lambda: cache.read_row(row))
