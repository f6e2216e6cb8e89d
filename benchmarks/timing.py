"""Measure several things in turn, and the peak memory of a process. Imports nothing but Python's own modules.

Things that are compared are measured one after another in each round, so a machine that is slow for a while slows all
of them. The first round warms up: it is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Sample = TypeVar("Sample")


def measure_in_turn(
    measurements: Mapping[Key, Callable[[], Sample]],
    *,
    rounds: int,
    on_round: Callable[[int], object] = lambda number: None,
) -> dict[Key, list[Sample]]:
    """Call each function once a round, and return what it returned in each round after the first.

    `on_round` gets the number of each round when it has ended; the warm-up is round 0.
    """
    samples: dict[Key, list[Sample]] = {key: [] for key in measurements}
    for number in range(rounds + 1):
        for key, measure in measurements.items():
            sample = measure()
            if number:
                samples[key].append(sample)
        on_round(number)
    return samples


def seconds(function: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes, mapped files included.

    It reads VmHWM, since on Linux ru_maxrss also counts the parent process, of which this one was a copy before exec.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
