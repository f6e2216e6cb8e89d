"""Time prefill and decoding of several engines in turn. Knows no text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ortgpt.engine.engine import Engine
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.verify import rounded

_PROMPT_TOKENS, _STEPS, _RUNS = 128, 32, 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of an engine for a batch of one."""

    prefill: float
    """Tokens per second of a prefill of 128 tokens, or of half the context."""
    decode: float
    """Tokens per second of up to 32 steps after it."""


def measure_speed(engines: Sequence[Engine]) -> list[Speed]:
    """Time each engine in turn, five times after a warm-up, and return the medians."""
    config = engines[0].config
    prompt = [index % engines[0].allowed_vocab_size for index in range(min(_PROMPT_TOKENS, config.n_positions // 2))]
    steps = min(_STEPS, config.n_positions - len(prompt))
    times: list[list[tuple[float, float]]] = [[] for _ in engines]
    for _ in range(_RUNS + 1):
        for engine, runs in zip(engines, times, strict=True):
            runs.append(_timed(engine, prompt, steps))
    medians = [[statistics.median(seconds) for seconds in zip(*runs[1:], strict=True)] for runs in times]
    return [
        Speed(prefill=rounded(len(prompt) / prefill_s), decode=rounded(steps / decode_s))
        for prefill_s, decode_s in medians
    ]


def _timed(engine: Engine, prompt: Ids, steps: int) -> tuple[float, float]:
    """Return the seconds of the prefill, and of the steps."""
    cache = engine.new_cache(1, len(prompt) + steps)
    started = time.perf_counter()
    engine.prefill(cache, [prompt])
    between = time.perf_counter()
    forward = engine.new_forward(cache)
    for _ in range(steps):
        forward.run(cache.lengths + 1)
        forward.logits()
    return between - started, time.perf_counter() - between
