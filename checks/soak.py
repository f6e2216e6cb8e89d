"""Use one loaded model for a long time: `python checks/soak.py [CALLS]` (default 2,000), a few minutes.

The calls have random lengths, options and batch sizes. After a warm-up, resident memory has to stay flat (less than
1 MB for 1,000 calls). An idle process has to use less than 2% of a CPU. 800 mixed calls in 16 threads have to give the
same results as one after another. Prompts far longer than the context have to be refused within a second. Prints each
figure; exits with 1 if one is missed.
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

THREADS, THREAD_CALLS = 16, 800


def main(calls: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        generator = ortgpt.load(export_bundle("austen", Path(folder) / "bundle").path)
        faults = check_memory(generator, calls) + check_idle()
        faults += check_threads(generator) + check_long_prompts(generator)
        generator.close()
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def call(generator: ortgpt.Generator, seed: int) -> Any:
    """Make the call that `seed` chooses, and return its result, which depends on nothing else."""
    choice = random.Random(seed)
    ids = [choice.randrange(generator.engine.allowed_vocab_size) for _ in range(choice.randint(1, 150))]
    options: dict[str, Any] = {"max_new_tokens": choice.randint(1, 60)}
    kind = choice.randrange(9)
    if kind == 0:
        rows = [ids[: choice.randint(1, len(ids))] for _ in range(choice.randint(1, 8))]
        return [row.token_ids for row in generator.generate_batch(rows, seed=seed, **options)]
    if kind == 1:
        return generator.generate(ids, num_beams=3, **options).token_ids
    if kind == 2:
        return "".join(piece.text for piece in generator.stream(ids, stop=["e", " the"], **options))
    if kind == 3:
        return generator.score(ids).nll
    if kind == 4:
        stream = generator.stream(ids, **options)
        first = next(stream)
        stream.close()
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
    for rows in range(1, 9):  # ONNX Runtime's arena keeps the memory of the largest shapes
        generator.generate_batch([[row + 1] * 150 for row in range(rows)], max_new_tokens=60, eos_token_id=[])
    seeds, sizes = [], []
    for seed in range(warm + calls):
        call(generator, seed)
        if seed >= warm and seed % 20 == 0:
            gc.collect()
            seeds.append(seed)
            sizes.append(resident_bytes())
    slope = float(np.polyfit(seeds, sizes, 1)[0]) * 1000 / 1e6
    print(f"{calls:,} calls after {warm:,}: resident {sizes[0] / 1e6:.1f} to {sizes[-1] / 1e6:.1f} MB, "
          f"slope {slope:+.2f} MB for 1,000 calls")  # fmt: skip
    return [f"memory grows by {slope:.2f} MB for 1,000 calls"] if slope >= 1 else []


def check_idle() -> list[str]:
    before = time.process_time()
    time.sleep(5)
    used = (time.process_time() - before) / 5
    print(f"idle: {used:.2%} of a CPU")
    return [f"an idle process uses {used:.1%} of a CPU"] if used >= 0.02 else []


def check_threads(generator: ortgpt.Generator) -> list[str]:
    seeds = range(THREAD_CALLS)
    serial = [call(generator, seed) for seed in seeds]
    with ThreadPoolExecutor(THREADS) as pool:
        threaded = list(pool.map(lambda seed: call(generator, seed), seeds))
    different = sum(one != other for one, other in zip(serial, threaded, strict=True))
    print(f"{THREADS} threads: {different} of {len(serial)} calls differ from serial ones")
    return [f"{different} calls differ in a thread"] if different else []


def check_long_prompts(generator: ortgpt.Generator) -> list[str]:
    faults = []
    for name, prompt in (
        ("1,000,000 characters of prose", "It is a truth universally acknowledged, " * 25_000),
        ("200,000 letters a", "a" * 200_000),
        ("1,000,000 spaces", " " * 1_000_000),
        ("200,000 emoji of several characters", "👩‍👩‍👧" * 200_000),
    ):
        started = time.perf_counter()
        try:
            generator.generate(prompt, max_new_tokens=1)
            faults.append(f"{name} were not refused")
        except ortgpt.ContextLengthError:
            pass
        seconds = time.perf_counter() - started
        print(f"{name}: refused in {seconds:.2f} s")
        faults += [f"{name} took {seconds:.2f} s"] if seconds > 1 else []
    return faults


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
