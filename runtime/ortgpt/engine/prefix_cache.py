"""Beginnings of texts that were computed before, with their keys and values, so that none is computed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ortgpt.engine.kv_cache import Cache, GrowingCache, RowKV
from ortgpt.forks import ProcessLock

FORWARD_TOKENS = 16  # a forward takes as long as it would take for this many more tokens in one that runs anyway


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
        """How many tokens did not have to be computed so far, thanks to it."""
        self._entries: OrderedDict[bytes, tuple[np.ndarray[tuple[int], np.dtype[np.int64]], RowKV]] = OrderedDict()
        self._lock = ProcessLock()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, ids: Sequence[int]) -> RowKV | None:
        """Return the keys and values of the longest known beginning of `ids`, at most of all but the last token."""
        array = np.array(ids[:-1], np.int64)
        with self._lock.here():
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
            return [part[:, :most] for part in self._entries[best][1]]

    def count_reused(self, tokens: int) -> None:
        """Add to `reused_tokens`."""
        with self._lock.here():
            self.reused_tokens += tokens

    def keep(self, ids: Sequence[int], read: Callable[[], RowKV]) -> None:
        """Keep the keys and values of `ids` that `read` returns, unless they are known or too large.

        An entry that is a beginning of `ids` is dropped.
        """
        array = np.array(ids, np.int64)
        with self._lock.here():
            for key, (kept, _) in self._entries.items():
                if kept.size >= array.size and np.array_equal(kept[: array.size], array):
                    self._entries.move_to_end(key)
                    return
        row_kv = read()
        size = sum(part.nbytes for part in row_kv)
        if not array.size or size > self.size_bytes:
            return
        with self._lock.here():
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
        with self._lock.here():
            self._entries.clear()
            self.used_bytes = 0

    def _drop(self, key: bytes, row_kv: RowKV) -> None:
        del self._entries[key]
        self.used_bytes -= sum(part.nbytes for part in row_kv)


def load_prefixes(prefixes: PrefixCache | None, cache: Cache, texts: Sequence[Sequence[int]]) -> None:
    """Load into each row of an empty cache what is known of the beginning of its text, if that saves time.

    A cache that is not empty is left as it is.
    """
    if prefixes is None or cache.lengths.any():
        return
    rows = [prefixes.find(ids) for ids in texts]
    known = [row[0].shape[1] if row else 0 for row in rows]
    if _saves_time(cache, known, [len(ids) for ids in texts]):
        cache.load_rows(rows)
        prefixes.count_reused(sum(known))


def _saves_time(cache: Cache, known: Sequence[int], lengths: Sequence[int]) -> bool:
    """Tell whether rows of these lengths are computed sooner after the `known` tokens of each than from the beginning.

    On an empty cache all rows are computed in one forward, padded to the longest. On another one a fixed cache takes
    the rows one after another.
    """
    rest = [length - count for length, count in zip(lengths, known, strict=True)]
    whole = len(rest) * max(lengths)
    if not any(known) or isinstance(cache, GrowingCache) or max(rest) == 1:
        return len(rest) * max(rest) < whole
    return sum(rest) + FORWARD_TOKENS * (len(rest) - 1) < whole


def keep_prefix(prefixes: PrefixCache | None, ids: Sequence[int], cache: Cache, row: int) -> None:
    """Keep the keys and values of a row that ended, whose tokens are `ids`."""
    if prefixes is not None:
        prefixes.keep(ids[: int(cache.lengths[row])], lambda: cache.read_row(row))
