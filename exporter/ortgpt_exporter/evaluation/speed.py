"""Time prefill and decoding of several engines in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ortgpt.engine.engine import Engine
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.verify import rounded

_SPEED_PROMPT, _SPEED_STEPS, _SPEED_RUNS = 128, 32, 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second: of a prefill, and of decoding after it."""

    prefill: float
    decode: float


def measure_speed(engines: Sequence[Engine]) -> list[Speed]:
    """Time prefill and decoding of each in turn, several times, and return the medians."""
    config = engines[0].config
    prompt = [index % engines[0].allowed_vocab_size for index in range(min(_SPEED_PROMPT, config.n_positions // 2))]
    steps = min(_SPEED_STEPS, config.n_positions - len(prompt))
    times: list[list[tuple[float, float]]] = [[] for _ in engines]
    for _ in range(_SPEED_RUNS + 1):
        for engine, rows in zip(engines, times, strict=True):
            rows.append(_timed(engine, prompt, steps))
    medians = [[statistics.median(row[place] for row in rows[1:]) for place in (0, 1)] for rows in times]
    return [Speed(prefill=rounded(len(prompt) / first), decode=rounded(steps / rest)) for first, rest in medians]


def _timed(engine: Engine, prompt: Ids, steps: int) -> tuple[float, float]:
    cache = engine.new_cache(1, len(prompt) + steps)
    started = time.perf_counter()
    engine.prefill(cache, [prompt])
    between = time.perf_counter()
    call = engine.new_forward(cache)
    for _ in range(steps):
        call.run(cache.lengths + 1)
        call.logits()
    return between - started, time.perf_counter() - between
