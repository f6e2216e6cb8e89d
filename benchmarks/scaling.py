"""Time a decode step of a bundle over batch sizes and contexts: `python benchmarks/scaling.py BUNDLE`.

Prints milliseconds, and in brackets how the time grew from the first cell, as a part of how bytes read or operations
grew, whichever grew more: above 1.00 a step grows faster than its work. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import ortgpt
from ortgpt.engine.kv_cache import FixedCache

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 512, 1000)
STEPS, ROUNDS = 7, 3

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("bundle")
parser.add_argument("--threads", type=int)
args = parser.parse_args()
with ortgpt.load(args.bundle, device="cpu", threads=args.threads) as generator:
    engine, config = generator.engine, generator.engine.config
    n_embd = config.n_head * engine.session.cache.head_dim
    parameters = 12 * config.n_layer * n_embd**2 + config.vocab_size * n_embd
    weights = sum(
        entry.size for name, entry in generator.bundle.manifest.files.items() if name.startswith("model.onnx")
    )
    contexts = [context for context in CONTEXTS if context + STEPS <= config.n_positions]
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(ROUNDS):
        for batch in BATCHES:
            for context in contexts:
                cache = engine.new_cache(batch, context + STEPS)
                assert isinstance(cache, FixedCache), "a native bundle is wanted"
                for buffer in cache.buffers:
                    buffer[:] = 0.01
                cache.lengths[:] = context
                call = engine.new_forward(cache)
                call.run(cache.lengths + 1)
                started = time.perf_counter()
                for _ in range(STEPS - 1):
                    call.run(cache.lengths + 1)
                    call.logits().argmax(axis=-1)
                times.setdefault((batch, context), []).append((time.perf_counter() - started) / (STEPS - 1))


def work(batch: int, context: int) -> tuple[float, float]:
    """Return the bytes that a step reads, and its multiplications."""
    positions = batch * (context + STEPS / 2)
    bytes_read = weights + positions * 2 * config.n_layer * n_embd * np.dtype(engine.session.cache.dtype).itemsize
    return bytes_read, batch * parameters + positions * 2 * config.n_layer * n_embd


medians = {cell: 1e3 * statistics.median(found) for cell, found in times.items()}
first = (BATCHES[0], contexts[0])
print(f"| batch | {' | '.join(f'context {context}' for context in contexts)} |")
print("|---" * (len(contexts) + 1) + "|")
for batch in BATCHES:
    cells = []
    for context in contexts:
        grown = max(now / then for now, then in zip(work(batch, context), work(*first), strict=True))
        ms = medians[batch, context]
        cells.append(f"{ms:.1f} ({ms / medians[first] / grown:.2f})")
    print(f"| {batch} | {' | '.join(cells)} |")
