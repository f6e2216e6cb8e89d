"""Time a decode step of a bundle over batch sizes and contexts: `python benchmarks/scaling.py BUNDLE`.

Prints milliseconds, medians of three rounds. In brackets: how the time grew from the first cell, divided by how much
the bytes read or the operations grew, whichever grew more; above 1.00 a step grows faster than its work. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import numpy as np
from timing import measure_in_turn, seconds

import ortgpt
from ortgpt.engine.engine import Engine
from ortgpt.engine.kv_cache import FixedCache

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 512, 1000)
STEPS, ROUNDS = 7, 3


def step_ms(engine: Engine, batch_size: int, context: int) -> float:
    """Return the mean milliseconds of a decode step after `context` tokens a row; the first step is not counted."""
    cache = engine.new_cache(batch_size, context + STEPS)
    if not isinstance(cache, FixedCache):
        raise SystemExit("this is a portable bundle (accepted: a native one)")
    for buffer in cache.buffers:
        buffer[:] = 0.01
    cache.lengths[:] = context
    forward = engine.new_forward(cache)
    forward.run(cache.lengths + 1)

    def steps() -> None:
        for _ in range(STEPS - 1):
            forward.run(cache.lengths + 1)
            forward.logits().argmax(axis=-1)

    return 1e3 * seconds(steps) / (STEPS - 1)


def step_work(generator: ortgpt.Generator, batch_size: int, context: int) -> tuple[float, float]:
    """Return the bytes that a step reads, and its multiplications."""
    engine, config, files = generator.engine, generator.engine.config, generator.bundle.manifest.files
    weights = sum(entry.size for name, entry in files.items() if name.startswith("model.onnx"))
    n_embd = config.n_head * engine.kv_shape.head_dim
    parameters = 12 * config.n_layer * n_embd**2 + config.vocab_size * n_embd
    positions = batch_size * (context + STEPS / 2)
    bytes_read = weights + positions * engine.kv_shape.token_bytes
    return bytes_read, batch_size * parameters + positions * 2 * config.n_layer * n_embd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with ortgpt.load(args.bundle, device="cpu", threads=args.threads) as generator:
        contexts = [context for context in CONTEXTS if context + STEPS <= generator.engine.config.n_positions]
        cells = [(batch_size, context) for batch_size in BATCH_SIZES for context in contexts]
        samples = measure_in_turn({cell: partial(step_ms, generator.engine, *cell) for cell in cells}, rounds=ROUNDS)
        medians = {cell: statistics.median(times) for cell, times in samples.items()}
        work = {cell: np.array(step_work(generator, *cell)) for cell in cells}
    print(f"| batch | {' | '.join(f'context {context}' for context in contexts)} |")
    print("|---" * (len(contexts) + 1) + "|")
    first = cells[0]
    for batch_size in BATCH_SIZES:
        row = []
        for context in contexts:
            ms, growth = medians[batch_size, context], (work[batch_size, context] / work[first]).max()
            row.append(f"{ms:.1f} ({ms / medians[first] / growth:.2f})")
        print(f"| {batch_size} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
