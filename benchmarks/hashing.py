"""What it costs to check every file's sha256 while a bundle loads: `python benchmarks/hashing.py BUNDLE...`.

Loads with and without it in turn, and prints the medians in seconds and their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time

import ortgpt

_LOADS = 21


def main(bundles: list[str]) -> None:
    print(f"{'bundle':<40}{'sha256':>10}{'size':>10}{'ratio':>8}")
    for bundle in bundles:
        taken: dict[str, list[float]] = {"sha256": [], "size": []}
        for _ in range(_LOADS):
            for verify, seconds in taken.items():
                started = time.perf_counter()
                ortgpt.load(bundle, verify=verify).close()
                seconds.append(time.perf_counter() - started)
        with_, without = (statistics.median(each) for each in taken.values())
        print(f"{bundle:<40}{with_:>10.3f}{without:>10.3f}{with_ / without:>8.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
