"""Find the merges of a BPE that joining by the rank of the joined text does not reproduce. Knows no file."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

Pair = tuple[str, str]


def unreachable_merges(merges: Sequence[Pair]) -> list[Pair]:
    """Return the merges that joining by the rank of the joined text does not reproduce from single letters.

    BPE ranks pairs, the runtime ranks the tokens that they join to. The two agree if the letters of each merged token,
    joined by the lower-ranked tokens only, give exactly the two parts of the merge.
    """
    ranks: dict[str, int] = {}
    bad = []
    for rank, (left, right) in enumerate(merges):
        if left + right in ranks or _join(left + right, ranks) != [left, right]:
            bad.append((left, right))
        ranks.setdefault(left + right, rank)
    return bad


def _join(text: str, ranks: Mapping[str, int]) -> list[str]:
    """Join the letters of `text` by rank, the leftmost first among equals, until two parts are left or none fits."""
    size = len(text)
    end_of = list(range(1, size + 1))  # the end of the part that starts at this letter; 0 if none does
    before = list(range(-1, size - 1))  # the start of the part before it
    waiting: list[tuple[int, int, int]] = []  # rank, start and end of two neighbours that can be joined

    def offer(start: int, end: int) -> None:
        rank = ranks.get(text[start:end])
        if rank is not None:
            heapq.heappush(waiting, (rank, start, end))

    for start in range(size - 1):
        offer(start, start + 2)
    count = size
    while waiting and count > 2:
        _, start, end = heapq.heappop(waiting)
        middle = end_of[start]
        if not 0 < middle < end or end_of[middle] != end:
            continue  # one of the two was joined to another part meanwhile
        end_of[start], end_of[middle] = end, 0
        count -= 1
        if end < size:
            before[end] = start
            offer(start, end_of[end])
        if start:
            offer(before[start], end)
    starts = [start for start in range(size) if end_of[start]]
    return [text[start : end_of[start]] for start in starts]
