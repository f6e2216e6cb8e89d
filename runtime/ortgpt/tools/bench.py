"""Measure a bundle on this machine: speed, start, memory, and the operators that the time goes to.

Prints nothing. Everything is measured several times in turn, and the medians are returned.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import GraphSpec
from ortgpt.contract import File
from ortgpt.engine.engine import Engine
from ortgpt.errors import EngineError
from ortgpt.generator import Generator
from ortgpt.loading import load
from ortgpt.ort.session import Session, open_graph

_SHORT, _LONG, _BATCH = 128, 900, 8
_STEPS = 24  # decode steps whose mean is one measurement
_ROUNDS, _MAX_S = 5, 20.0  # at least two rounds; no new round after so many seconds
_SAMPLED_PROMPT, _SAMPLED_TOKENS = 64, 64
_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "repetition_penalty": 1.0},
    "sampled": {"seed": 0, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
    "nucleus": {"seed": 0, "temperature": 0.8, "top_k": 0, "top_p": 0.95, "repetition_penalty": 1.0},
}
_READ_BYTES = 2**28  # more than the caches of a CPU
_STARTS = 3
# Runs in a process of its own and prints its peak memory. On Linux, ru_maxrss includes the parent process, of which the
# process was a copy before exec; VmHWM does not.
_START = """
import sys, ortgpt
generator = ortgpt.load(sys.argv[1], device=sys.argv[2], threads=int(sys.argv[3]))
generator.generate("It is a truth universally acknowledged", max_new_tokens=1)
try:
    status = dict(line.split(":", 1) for line in open("/proc/self/status", encoding="utf-8", errors="replace"))
    print(int(status["VmHWM"].split()[0]) * 1024)
except OSError:
    try:
        import resource
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    except ImportError:
        print("unknown")
"""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The nodes of one operator, and their time in one run, in milliseconds."""

    name: str
    nodes: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured of a bundle; times are medians."""

    bundle: str
    dtype: str
    device: str
    threads: int
    short_tokens: int
    """The tokens of the short prompt."""
    long_tokens: int
    """The tokens of the long prompt."""
    prefill_short_ms: float
    decode_short_ms: float
    prefill_long_ms: float
    decode_long_ms: float
    batch_size: int
    batch_step_ms: float
    tokens_per_s: dict[str, float]
    """After 64 tokens: "greedy"; "sampled" (temperature 0.8, top_k 50, top_p 0.95, repetition_penalty 1.1); "nucleus"
    (temperature 0.8, top_p 0.95 of the whole vocabulary)."""
    start_s: float | None
    """From the start of a process that loads the bundle and generates one token to its end; None in a frozen app, which
    has no Python to start."""
    peak_memory_mb: float | None
    """The peak memory of that process; None if the system does not tell, and in a frozen app."""
    disk_mb: float
    step_bytes: int
    """The weights and the cache that a step after the short prompt reads."""
    memory_gb_per_s: float
    """How fast that many threads read memory."""
    step: tuple[Operator, ...]
    """The operators of a step after the short prompt."""
    prefill: tuple[Operator, ...]
    """The operators of a prefill of the long prompt."""

    @property
    def step_gb_per_s(self) -> float:
        """How fast a step after the short prompt reads its weights and cache."""
        return self.step_bytes / self.decode_short_ms / 1e6


def bench_bundle(path: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None) -> Measurements:
    """Measure a bundle; takes less than a minute for a GPT-2 small. Raises as load() does, and EngineError."""
    with load(path, device=device, threads=threads) as generator:
        bundle, engine = generator.bundle, generator.engine
        session = engine.session
        prefill = session if engine.prefill_graph is None else engine.prefill_graph.session()
        new_tokens = min(_STEPS, engine.config.n_positions // 4)
        most = engine.config.n_positions - new_tokens
        short, long = min(_SHORT, most), min(_LONG, most)
        times = _cells(engine, short, long, new_tokens)
        rates = _rates(generator)
        start_s, peak_memory_mb = _start(bundle, session)
        return Measurements(
            bundle=str(bundle.path),
            dtype=bundle.manifest.precision.dtype,
            device=str(session.device),
            threads=session.threads,
            short_tokens=short,
            long_tokens=long,
            **times,
            batch_size=_BATCH,
            tokens_per_s=rates,
            start_s=start_s,
            peak_memory_mb=peak_memory_mb,
            disk_mb=sum(entry.size for entry in bundle.manifest.files.values()) / 1e6,
            step_bytes=_step_bytes(bundle, engine, short + new_tokens // 2),
            memory_gb_per_s=read_gb_per_s(session.threads),
            step=_profile(bundle, engine, session.graph, lambda probe: time_engine(probe, 1, short, new_tokens)),
            prefill=_profile(bundle, engine, prefill.graph, lambda probe: _prefill_often(probe, long)),
        )


def _cells(engine: Engine, short: int, long: int, new_tokens: int) -> dict[str, float]:
    """Return the milliseconds of each cell, measured in turn; the first round warms up."""
    began = time.perf_counter()
    rounds: list[dict[str, float]] = []
    while len(rounds) <= 2 or (len(rounds) <= _ROUNDS and time.perf_counter() - began < _MAX_S):
        times: dict[str, float] = {}
        times["prefill_short_ms"], times["decode_short_ms"] = time_engine(engine, 1, short, new_tokens)
        times["prefill_long_ms"], times["decode_long_ms"] = time_engine(engine, 1, long, new_tokens)
        _, times["batch_step_ms"] = time_engine(engine, _BATCH, short, new_tokens)
        rounds.append(times)
    return {name: statistics.median(times[name] for times in rounds[1:]) for name in rounds[0]}


def time_engine(engine: Engine, batch_size: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
    """Return the milliseconds of a prefill of a batch, and of a step after it, the mean of `new_tokens`."""
    cache = engine.new_cache(batch_size, prompt_tokens + new_tokens)
    prompts = [_prompt(engine, prompt_tokens)] * batch_size
    started = time.perf_counter()
    engine.prefill(cache, prompts)
    between = time.perf_counter()
    forward = engine.new_forward(cache)
    for _ in range(new_tokens):
        forward.run(cache.lengths + 1)
        forward.logits().argmax(axis=-1)
    return 1e3 * (between - started), 1e3 * (time.perf_counter() - between) / new_tokens


def _prefill_often(engine: Engine, tokens: int) -> None:
    for _ in range(4):
        engine.prefill(engine.new_cache(1, tokens), [_prompt(engine, tokens)])


def _prompt(engine: Engine, tokens: int) -> list[int]:
    return [7 * index % engine.allowed_vocab_size for index in range(tokens)]


def _rates(generator: Generator) -> dict[str, float]:
    """Return the tokens per second of each way to pick a token, measured in turn."""
    n_positions = generator.engine.config.n_positions
    prompt = _prompt(generator.engine, min(_SAMPLED_PROMPT, n_positions // 2))
    tokens = min(_SAMPLED_TOKENS, n_positions - len(prompt))
    seconds: dict[str, list[float]] = {name: [] for name in _SAMPLING}
    began = time.perf_counter()
    while len(seconds["greedy"]) <= 2 or (
        len(seconds["greedy"]) <= 2 * _ROUNDS and time.perf_counter() - began < _MAX_S / 2
    ):
        for name, options in _SAMPLING.items():
            done = generator.generate(prompt, max_new_tokens=tokens, eos_token_id=[], **options)
            seconds[name].append(done.timings.decode_s)
    return {name: (tokens - 1) / statistics.median(found[1:]) for name, found in seconds.items()}


def _start(bundle: Bundle, session: Session) -> tuple[float | None, float | None]:
    """Return the seconds from a process's start to its end after one token, and its peak memory in megabytes."""
    if getattr(sys, "frozen", False):  # sys.executable is the app
        return None, None
    command = [sys.executable, "-X", "utf8", "-c", _START, str(bundle.path), str(session.device), str(session.threads)]
    seconds, peaks = [], []
    for _ in range(_STARTS):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        seconds.append(time.perf_counter() - started)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise EngineError(f"a process that loads {bundle.path} fails: {last}")
        peaks += [int(word) for word in done.stdout.split() if word.isdecimal()]
    return statistics.median(seconds), statistics.median(peaks) / 1e6 if peaks else None


def _step_bytes(bundle: Bundle, engine: Engine, length: int) -> int:
    """Return the bytes of weights and of cache that a step after `length` tokens reads."""
    files = bundle.manifest.files
    weights = sum(files[name].size for name in (engine.session.graph.file, File.MODEL_DATA) if name in files)
    return weights + length * engine.kv_shape.token_bytes


def read_gb_per_s(threads: int) -> float:
    """Return how fast `threads` threads read memory, the median of several times."""
    parts = np.array_split(np.ones(_READ_BYTES // 4, np.float32), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(11):
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - started)
    return _READ_BYTES / statistics.median(seconds[1:]) / 1e9


def _profile(bundle: Bundle, engine: Engine, graph: GraphSpec, run: Callable[[Engine], object]) -> tuple[Operator, ...]:
    """Let `run` use a graph that records the time of each node; return the mean of its runs except the first two."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_graph(
            bundle, graph, engine.session.device, threads=engine.session.threads, profile=Path(folder) / "profile"
        )
        run(Engine(session, engine.config))
        events = json.loads(Path(session.handle.end_profiling()).read_text(encoding="utf-8"))
    starts = sorted(event["ts"] for event in events if event["name"] == "model_run")[2:]
    nodes = [
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= starts[0]
    ]
    ms, counts = Counter[str](), Counter[str]()
    for event in nodes:
        ms[event["args"]["op_name"]] += event["dur"] / 1e3
        counts[event["args"]["op_name"]] += 1
    return tuple(
        Operator(name=name, nodes=counts[name] // len(starts), ms=total / len(starts))
        for name, total in ms.most_common()
    )


def bench_lines(found: Measurements) -> list[str]:
    """Return measurements as a table."""
    greedy = found.tokens_per_s["greedy"]
    slower = {name: f"{100 * (greedy / rate - 1):+.1f}% a token" for name, rate in found.tokens_per_s.items()}
    moved, most = found.step_gb_per_s, found.memory_gb_per_s
    start = "not measured in a frozen app" if found.start_s is None else f"{found.start_s:,.2f}"
    peak = "not known" if found.peak_memory_mb is None else f"{found.peak_memory_mb:,.0f}"
    short, long = f"{found.short_tokens:,}", f"{found.long_tokens:,}"
    rows = [
        (f"prefill of {short} tokens, ms", f"{found.prefill_short_ms:,.1f}", ""),
        (f"decode at {short}, ms a token", f"{found.decode_short_ms:,.2f}", ""),
        (f"prefill of {long} tokens, ms", f"{found.prefill_long_ms:,.1f}", ""),
        (f"decode at {long}, ms a token", f"{found.decode_long_ms:,.2f}", ""),
        (f"batch of {found.batch_size} at {short}, ms a step", f"{found.batch_step_ms:,.2f}", ""),
        ("process start to first token, s", start, ""),
        ("peak memory of that process, MB", peak, ""),
        ("on disk, MB", f"{found.disk_mb:,.1f}", ""),
        ("greedy, tokens/s", f"{greedy:,.0f}", ""),
        ("temperature, top_k, top_p, penalty, tokens/s", f"{found.tokens_per_s['sampled']:,.0f}", slower["sampled"]),
        ("top_p of the whole vocabulary, tokens/s", f"{found.tokens_per_s['nucleus']:,.0f}", slower["nucleus"]),
        (f"a step at {short} reads, GB/s", f"{moved:,.1f}", f"{100 * moved / most:.0f}% of what this memory gives"),
        ("memory read by that many threads, GB/s", f"{most:,.1f}", ""),
    ]
    lines = [f"{found.bundle}: {found.dtype}, {found.device}, threads: {found.threads}"]
    lines += [f"{name:<46}{value:>9}  {remark}".rstrip() for name, value, remark in rows]
    for title, operators in ((f"a step at {short}", found.step), (f"a prefill of {long}", found.prefill)):
        whole = sum(each.ms for each in operators)
        lines += ["", f"{title + ', by operator':<36}{'nodes':>6}{'ms':>10}{'share':>8}"]
        lines += [f"{each.name:<36}{each.nodes:>6}{each.ms:>10.3f}{each.ms / whole:>8.1%}" for each in operators]
    return lines
