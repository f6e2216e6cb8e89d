"""A long life in one process: `python tests/soak.py [CALLS]` (default 2,000), a few minutes.

Generations of random length, options and batch size on one loaded model: resident memory must stay flat behind a
warm-up (less than 1 MB for 1,000 calls), an idle process must use less than 2% of a CPU, 800 mixed calls in 16 threads
must give what the same calls give one after the other, and prompts far beyond the context must be refused within a
second. Prints the figures; exit code 1 where one is missed.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import ortgpt
from ortgpt_exporter import export_bundle

_THREADS, _CALLS = 16, 800


def main(calls: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        generator = ortgpt.load(export_bundle("austen", Path(folder) / "bundle").path)
        faults = [
            *check_memory(generator, calls), *check_idle(), *check_threads(generator), *check_long_prompts(generator)
        ]  # fmt: skip
        generator.close()
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def call(generator: ortgpt.Generator, seed: int) -> Any:
    """Do one of the calls that there are, as `seed` says; the answer depends on the seed only."""
    choice = random.Random(seed)
    ids = [choice.randrange(generator.engine.allowed_vocab_size) for _ in range(choice.randint(1, 150))]
    options: dict[str, Any] = {"max_new_tokens": choice.randint(1, 60)}
    kind = choice.randrange(9)
    if kind == 0:
        rows = [ids[: choice.randint(1, len(ids))] for _ in range(choice.randint(1, 8))]
        return [each.token_ids for each in generator.generate_batch(rows, seed=seed, **options)]
    if kind == 1:
        return [each.token_ids for each in generator.generate_batch([ids], num_beams=3, **options)]
    if kind == 2:
        return "".join(piece.text for piece in generator.stream(ids, stop=["e", " the"], **options))
    if kind == 3:
        return generator.score(ids).nll
    if kind == 4:
        stream = generator.stream(ids, **options)
        first = next(stream)
        stream.close()  # type: ignore[attr-defined]
        return first.text
    if kind == 5:
        return generator.generate(ids, grammar="[a-z ]{3,40}", seed=seed, **options).token_ids
    if kind == 6:
        return generator.generate(ids, prompt_lookup_num_tokens=8, logprobs=2, **options).token_ids
    if kind == 7:
        try:
            generator.generate(ids, max_new_tokens=10_000)
        except ortgpt.ContextLengthError as error:
            return str(error)
        raise AssertionError("10,000 tokens were not refused")
    return generator.generate(ids, top_p=0.9, repetition_penalty=1.2, seed=seed, **options).token_ids


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_memory(generator: ortgpt.Generator, calls: int) -> list[str]:
    warm = max(100, calls // 4)
    for rows in range(1, 9):  # ONNX Runtime's arena keeps what the largest shapes took
        generator.generate_batch([[row + 1] * 150 for row in range(rows)], max_new_tokens=60, eos_token_id=[])
    marks: list[tuple[int, int]] = []
    for seed in range(warm + calls):
        call(generator, seed)
        if seed >= warm and seed % 20 == 0:
            gc.collect()
            marks.append((seed, resident_bytes()))
    slope = float(np.polyfit([seed for seed, _ in marks], [size for _, size in marks], 1)[0]) * 1000 / 1e6
    print(f"{calls:,} calls behind {warm:,}: resident {marks[0][1] / 1e6:.1f} to {marks[-1][1] / 1e6:.1f} MB, "
          f"slope {slope:+.2f} MB for 1,000 calls")  # fmt: skip
    return [f"memory grows by {slope:.2f} MB for 1,000 calls"] if slope >= 1 else []


def check_idle() -> list[str]:
    before = time.process_time()
    time.sleep(5)
    used = (time.process_time() - before) / 5
    print(f"idle: {used:.2%} of a CPU")
    return [f"an idle process uses {used:.1%} of a CPU"] if used >= 0.02 else []


def check_threads(generator: ortgpt.Generator) -> list[str]:
    seeds = range(_CALLS)
    serial = [call(generator, seed) for seed in seeds]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda seed: call(generator, seed), seeds))
    different = sum(one != two for one, two in zip(serial, found, strict=True))
    print(f"{_THREADS} threads: {different} of {len(serial)} calls differ from serial ones")
    return [f"{different} calls gave something else in a thread"] if different else []


def check_long_prompts(generator: ortgpt.Generator) -> list[str]:
    faults = []
    for what, prompt in (
        ("1,000,000 characters of prose", "It is a truth universally acknowledged, " * 25_000),
        ("200,000 times one letter", "a" * 200_000),
        ("1,000,000 blanks", " " * 1_000_000),
        ("200,000 times an emoji of several", "👩‍👩‍👧" * 200_000),
    ):
        started = time.perf_counter()
        try:
            generator.generate(prompt, max_new_tokens=1)
            faults.append(f"{what} were not refused")
        except ortgpt.ContextLengthError:
            pass
        seconds = time.perf_counter() - started
        print(f"{what}: refused in {seconds:.2f} s")
        faults += [f"{what} took {seconds:.2f} s"] if seconds > 1 else []
    return faults


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
