"""Measure what it costs to check every file's sha256 while a bundle loads: `python benchmarks/hashing.py BUNDLE...`.

Loads each bundle with and without the check in turn, and prints the medians in seconds and their ratio.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

from timing import measure_in_turn, seconds

import ortgpt

ROUNDS = 20
CHECKS = ("sha256", "size")


def load_and_close(bundle: str, verify: str) -> None:
    ortgpt.load(bundle, verify=verify).close()


def main(bundles: list[str]) -> None:
    print(f"{'bundle':<40}{'sha256':>10}{'size':>10}{'ratio':>8}")
    for bundle in bundles:
        loads = {verify: partial(seconds, partial(load_and_close, bundle, verify)) for verify in CHECKS}
        with_hashes, without = map(statistics.median, measure_in_turn(loads, rounds=ROUNDS).values())
        print(f"{bundle:<40}{with_hashes:>10.3f}{without:>10.3f}{with_hashes / without:>8.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
