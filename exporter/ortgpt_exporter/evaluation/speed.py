"""The speed of several engines, timed in turn. Knows no text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ortgpt.engine.engine import Engine
from ortgpt.tools.bench import time_engine
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
    n_positions = engines[0].config.n_positions
    prompt_tokens = min(_PROMPT_TOKENS, n_positions // 2)
    steps = min(_STEPS, n_positions - prompt_tokens)
    rounds = [[time_engine(engine, 1, prompt_tokens, steps) for engine in engines] for _ in range(_RUNS + 1)]
    speeds = []
    for times in zip(*rounds[1:], strict=True):
        prefill_ms, step_ms = (statistics.median(column) for column in zip(*times, strict=True))
        speeds.append(Speed(prefill=rounded(1e3 * prompt_tokens / prefill_ms), decode=rounded(1e3 / step_ms)))
    return speeds
