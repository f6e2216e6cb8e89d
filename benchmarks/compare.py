"""Compare the speed and memory of ortgpt with those of other programs, measured in turn on one machine.

`make bench-peers` sets the other environments up and runs this. Each program runs in its own environment and process,
with the same weights (a random GPT-2 small unless --checkpoint names one; speed does not depend on their values), the
same token ids and the same number of threads. It decodes greedily, and has to return the number of tokens that the job
names. Run it on a machine that does nothing else. Writes compare.json, compare.md and compare.png into the work folder,
which must not exist yet; a program that cannot be installed, converted or run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from timing import measure_in_turn

HERE = Path(__file__).parent
PEERS = HERE / "peers"
PROMPT = "It is a truth universally acknowledged, that a single man"
NEW_TOKENS = 32
# How each cell is measured: tokens of the prompt, rows, and whether the first token counts or a step after it.
CELLS = {
    "prefill 128, ms": (128, 1, "first"),
    "decode at 128, ms": (128, 1, "step"),
    "prefill 900, ms": (900, 1, "first"),
    "decode at 900, ms": (900, 1, "step"),
    "batch 8 step, ms": (128, 8, "step"),
    "batch 16 step, ms": (128, 16, "step"),
}
START, MEMORY, DISK = "start to first token, s", "peak memory, MB", "on disk, MB"
LONG_MEMORY = "peak after 900 tokens, MB"
LONG_TOKENS = 900  # of the prompt after which a process tells that peak
COLUMNS = (*CELLS, START, MEMORY, LONG_MEMORY, DISK)
LIMIT_S = 1800  # for a program to convert the weights


@dataclass(frozen=True)
class Program:
    """A program that is compared."""

    name: str
    """Its name in the tables."""
    script: str
    """Its script in the folder peers."""
    classes: dict[str, str]
    """The class of each of its formats; formats of one class are compared with each other."""
    remarks: dict[str, str] = field(default_factory=dict)
    """The remark on a format that is listed, but not compared."""


PROGRAMS = (
    Program("ortgpt", "ortgpt_speed.py",
            {"float32": "float32", "int8": "8 bits", "int4": "4 bits"}),
    Program("openvino-genai", "openvino_speed.py",
            {"float32": "float32", "bfloat16": "float32", "int8": "8 bits", "int4": "4 bits"},
            {"bfloat16": "a float32 file, computed in bfloat16"}),
    Program("llama.cpp", "llama_cpp_speed.py", {"f32": "float32", "Q8_0": "8 bits", "Q4_0": "4 bits"}),
    Program("ctranslate2", "ctranslate2_speed.py", {"float32": "float32", "int8": "8 bits"}),
    Program("optimum-onnx", "optimum_speed.py", {"float32": "float32", "int8": "8 bits"}),
    Program("transformers", "transformers_speed.py", {"float32": "float32"}),
)  # fmt: skip


@dataclass(eq=False)  # a key of dictionaries
class Entry:
    """A program with one of its formats: where its model is, and what was measured."""

    program: Program
    format: str
    python: str
    """The interpreter of its environment."""
    path: str
    size_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    """What was measured, by cell."""
    failure: str | None = None
    """Why it could not be measured."""

    @property
    def class_name(self) -> str:
        return self.program.classes[self.format]

    @property
    def name(self) -> str:
        remark = self.program.remarks.get(self.format)
        return f"{self.program.name} {self.format}" + (f" ({remark})" if remark else "")

    @property
    def is_compared(self) -> bool:
        return self.format not in self.program.remarks

    @property
    def is_ours(self) -> bool:
        return self.program.name == "ortgpt"

    def values(self) -> dict[str, float]:
        """Return the median of each cell."""
        medians = {cell: statistics.median(samples) for cell, samples in self.samples.items()}
        return medians | {DISK: self.size_bytes / 1e6}


class FailedError(Exception):
    """A program failed; the message is the last that it wrote."""


def environment() -> dict[str, str]:
    """Return the environment of the programs, in which a script can import timing.py."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GGML_NO_BACKTRACE": "1"}
    return os.environ | offline | {"PYTHONPATH": path}


def convert(program: Program, python: str, checkpoint: Path, work: Path) -> list[Entry]:
    """Let a program write its models. Raises FailedError."""
    print(f"converting for {program.name} ...", file=sys.stderr, flush=True)
    result = subprocess.run(
        [python, PEERS / program.script, "convert", checkpoint, work / program.name],
        capture_output=True, text=True, check=False, env=environment(), timeout=LIMIT_S,
    )  # fmt: skip
    if result.returncode:
        raise FailedError(last_lines(result.stderr))
    models = json.loads(result.stdout.splitlines()[-1])
    return [Entry(program, name, python, models[name]["path"], models[name]["bytes"]) for name in program.classes]


def last_lines(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-2:])[-300:] or "it wrote no message"


class Server:
    """A process of a program that has its model open and answers one request after another."""

    def __init__(self, entry: Entry, threads: int, log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [entry.python, PEERS / entry.program.script, "serve", entry.path, entry.format, str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(),
            )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """Return the seconds to the first token, and those for the other tokens. Raises FailedError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise FailedError(last_lines(self.log.read_text(errors="replace"))) from None
        line = self.process.stdout.readline()
        if not line:
            raise FailedError(last_lines(self.log.read_text(errors="replace")))
        answer = json.loads(line)
        counts = [len(row) for row in answer["ids"]]
        if counts != [new_tokens] * len(prompts):
            raise FailedError(f"it returned {counts} tokens (accepted: {new_tokens} in each of {len(prompts)} rows)")
        return answer["first_s"], answer["rest_s"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure_cells(entries: list[Entry], *, vocab_size: int, threads: int, rounds: int, work: Path) -> None:
    """Measure the cells of one class, one program after another in each round."""
    servers = {entry: Server(entry, threads, work / f"{entry.program.name}-{entry.format}.log") for entry in entries}
    # New prompts each time, since a program may keep what it computed for one; the same ones for every program.
    generators = {entry: np.random.default_rng(0) for entry in entries}

    def cell_ms(entry: Entry, cell: str) -> dict[str, float]:
        tokens, rows, counted = CELLS[cell]
        prompts = generators[entry].integers(vocab_size, size=(rows, tokens)).tolist()
        new_tokens = 2 if counted == "first" else NEW_TOKENS
        first_s, rest_s = servers[entry].generate(prompts, new_tokens)
        return {cell: 1e3 * (first_s if counted == "first" else rest_s / (new_tokens - 1))}

    try:
        measure_entries(entries, [partial(cell_ms, cell=cell) for cell in CELLS], rounds=rounds)
    finally:
        for server in servers.values():
            server.close()


def measure_start(entries: list[Entry], *, vocab_size: int, threads: int, rounds: int) -> None:
    """Measure a process that opens the model and prints one token: its time, and its peak memory.

    Then it computes a long prompt, and tells its peak once more.
    """
    prompt = json.dumps(np.random.default_rng(1).integers(vocab_size, size=LONG_TOKENS).tolist())

    def start(entry: Entry) -> dict[str, float]:
        script = str(PEERS / entry.program.script)
        command = [entry.python, script, "start", entry.path, entry.format, str(threads), PROMPT, prompt]
        started = time.perf_counter()
        with tempfile.TemporaryFile("w+") as errors:  # not a pipe, which a talkative program would fill
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
            assert process.stdout is not None
            token = process.stdout.readline()
            start_s = time.perf_counter() - started
            peaks = process.communicate()[0].split()
            errors.seek(0)
            if not token or len(peaks) != 2:
                raise FailedError(last_lines(errors.read()))
        return {START: start_s, MEMORY: int(peaks[0]) / 1e6, LONG_MEMORY: int(peaks[1]) / 1e6}

    measure_entries(entries, [start], rounds=rounds)


def measure_entries(entries: list[Entry], functions: list[Callable[[Entry], dict[str, float]]], *, rounds: int) -> None:
    """Call each function for every entry in turn, and add the values that it returns, by cell, to the entry."""

    def measure(entry: Entry, function: Callable[[Entry], dict[str, float]]) -> dict[str, float]:
        if entry.failure is None:
            try:
                return function(entry)
            except FailedError as error:
                entry.failure = str(error)
        return {}

    measurements = {(entry, function): partial(measure, entry, function) for function in functions for entry in entries}
    samples = measure_in_turn(measurements, rounds=rounds, on_round=partial(print, "  round", file=sys.stderr))
    for (entry, _), rows in samples.items():
        for cell, value in (item for row in rows for item in row.items()):
            entry.samples.setdefault(cell, []).append(value)


def table(class_name: str, entries: list[Entry]) -> list[str]:
    """Return the rows of a class as Markdown; the last ones compare each of ours with the best other program."""
    lines = [f"| {class_name} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for entry in entries:
        if entry.failure:
            lines.append(f"| {entry.name} | failed: {entry.failure} |" + " |" * (len(COLUMNS) - 1))
            continue
        values = entry.values()
        shown = " | ".join(f"{values[cell]:.2f}" if cell == START else f"{values[cell]:.1f}" for cell in COLUMNS)
        lines.append(f"| {entry.name} | {shown} |")
    measured = [entry for entry in entries if not entry.failure]
    others = [entry.values() for entry in measured if entry.is_compared and not entry.is_ours]
    for entry in measured:
        if entry.is_ours and others:
            values = entry.values()
            ratios = " | ".join(f"{min(other[cell] for other in others) / values[cell]:.2f}×" for cell in COLUMNS)
            lines.append(f"| best other ÷ {entry.name} | {ratios} |")
    return lines


def draw(entries: list[Entry], path: Path) -> None:
    """Draw each column of the tables as bars, in a panel of its own."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [entry for entry in entries if not entry.failure]
    figure, axes = pyplot.subplots(2, 5, figsize=(26, 2 + 0.6 * len(shown)), sharey=True, constrained_layout=True)
    names = [entry.name for entry in shown]
    colours = ["tab:orange" if entry.is_ours else "tab:blue" for entry in shown]
    for axis, cell in zip(axes.flat, COLUMNS, strict=True):
        values = [entry.values()[cell] for entry in shown]
        axis.bar_label(axis.barh(names, values, color=colours), fmt="%.3g", padding=2)
        axis.set_title(cell)
        axis.margins(x=0.15)
    axes.flat[0].invert_yaxis()
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def make_checkpoint(folder: Path) -> Path:
    """Write a random GPT-2 small with the vocabulary of GPT-2."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sys.path.insert(0, str(HERE.parent / "tests"))
    from support import write_real_tokenizer

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    write_real_tokenizer(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for models and results")
    parser.add_argument("environments", nargs="*", metavar="NAME=PYTHON", help="the interpreter of a program")
    parser.add_argument("--checkpoint", type=Path, help="a Hugging Face folder of a GPT-2 [default: a random one]")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pythons = {"ortgpt": sys.executable, "transformers": sys.executable}
    pythons |= dict(argument.split("=", 1) for argument in args.environments)
    work = args.work.absolute()
    if work.exists():
        sys.exit(f"{work} exists; name a new folder, or remove it")
    work.mkdir(parents=True)
    checkpoint = args.checkpoint or make_checkpoint(work / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    longest = max(tokens for tokens, _, _ in CELLS.values()) + NEW_TOKENS
    if config["n_positions"] < longest:
        sys.exit(f"{checkpoint} has n_positions = {config['n_positions']} (accepted: {longest} or more)")
    entries, missing = [], {}
    for program in PROGRAMS:
        if program.name not in pythons:
            missing[program.name] = "it has no environment"
            continue
        try:
            entries += convert(program, pythons[program.name], checkpoint, work)
        except (FailedError, OSError, subprocess.TimeoutExpired) as error:
            missing[program.name] = str(error)
    lines = [
        f"{platform.machine()}, {args.threads} threads, Python {platform.python_version()}, {args.rounds} rounds, load "
        f"before the first: {os.getloadavg()[0]:.1f}"
    ]
    for class_name in sorted({entry.class_name for entry in entries}):
        print(f"measuring {class_name} ...", file=sys.stderr, flush=True)
        members = [entry for entry in entries if entry.class_name == class_name]
        measure_cells(members, vocab_size=config["vocab_size"], threads=args.threads, rounds=args.rounds, work=work)
        measure_start(members, vocab_size=config["vocab_size"], threads=args.threads, rounds=args.rounds)
        lines += ["", *table(class_name, members)]
    lines += ["", *(f"- {name}: missing: {reason}" for name, reason in missing.items())]
    text = "\n".join(lines).strip()
    print(text)
    (work / "compare.md").write_text(text + "\n", encoding="utf-8")
    results: dict[str, Any] = {
        "missing": missing,
        "entries": [
            {"program": entry.program.name, "format": entry.format, "class": entry.class_name, "failure": entry.failure,
             "medians": entry.values(), "samples": entry.samples}
            for entry in entries
        ],
    }  # fmt: skip
    (work / "compare.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(entries, work / "compare.png")


if __name__ == "__main__":
    main()
