"""Compare ortgpt with the programs that people would use instead: one run, one machine, interleaved, medians.

`make bench-peers` sets the others' environments up and runs this. Each program runs in its own environment and process,
on the same weights (a random GPT-2 small unless --checkpoint names one; speed does not depend on their values), the
same token ids and as many threads, greedily, and must return as many tokens as were asked for. Run it on a machine that
does nothing else. Writes compare.json, compare.md and compare.png into the work folder, which must be new; a program
that cannot be installed, converted or run is listed with the reason.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(__file__).parent / "peers"
PROMPT = "It is a truth universally acknowledged, that a single man"
NEW_TOKENS = 32
# How each cell is measured: tokens of a prompt, rows, and whether the first token counts or a step behind it.
CELLS = {
    "prefill 128, ms": (128, 1, "first"),
    "decode at 128, ms": (128, 1, "step"),
    "prefill 900, ms": (900, 1, "first"),
    "decode at 900, ms": (900, 1, "step"),
    "batch 8 step, ms": (128, 8, "step"),
}
START, MEMORY, DISK = "start to first token, s", "peak memory, MB", "on disk, MB"
LIMIT_S = 1800  # for a program to convert the weights


@dataclass(frozen=True)
class Program:
    """A program, its script among the peers, and the class of each of its formats: what it is compared with.

    A format with a remark is listed with it, and not compared.
    """

    name: str
    script: str
    classes: dict[str, str]
    remarks: dict[str, str] = field(default_factory=dict)


PROGRAMS = (
    Program("ortgpt", "ortgpt_speed.py",
            {"float32": "float32", "int8": "8 bits", "int8 --fast-prefill": "8 bits", "int4": "4 bits",
             "int4 --fast-prefill": "4 bits"}),
    Program("openvino-genai", "openvino_speed.py",
            {"float32": "float32", "bfloat16": "float32", "int8": "8 bits", "int4": "4 bits"},
            {"bfloat16": "a float32 file, computed in bfloat16"}),
    Program("llama.cpp", "llama_cpp_speed.py", {"f32": "float32", "Q8_0": "8 bits", "Q4_0": "4 bits"}),
    Program("ctranslate2", "ctranslate2_speed.py", {"float32": "float32", "int8": "8 bits"}),
    Program("optimum-onnx", "optimum_speed.py", {"float32": "float32", "int8": "8 bits"}),
    Program("transformers", "transformers_speed.py", {"float32": "float32"}),
)  # fmt: skip


@dataclass
class Entry:
    """One program with one format: where its model is, and what was measured."""

    program: Program
    form: str
    python: str
    path: str
    size_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def kind(self) -> str:
        return self.program.classes[self.form]

    @property
    def name(self) -> str:
        remark = self.program.remarks.get(self.form)
        return f"{self.program.name} {self.form}" + (f" ({remark})" if remark else "")

    @property
    def is_compared(self) -> bool:
        return self.form not in self.program.remarks

    @property
    def is_ours(self) -> bool:
        return self.program.name == "ortgpt"

    def add(self, cell: str, value: float) -> None:
        self.samples.setdefault(cell, []).append(value)

    def values(self) -> dict[str, float]:
        """Return the median of each cell."""
        medians = {cell: statistics.median(samples) for cell, samples in self.samples.items()}
        return medians | {DISK: self.size_bytes / 1e6}


class FailedError(Exception):
    """A program could not do what was asked; the message says what it said last."""


def environment() -> dict[str, str]:
    return os.environ | {"GGML_NO_BACKTRACE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def convert(program: Program, python: str, checkpoint: Path, work: Path) -> list[Entry]:
    """Let a program write its models. Raises FailedError with its last words."""
    print(f"converting for {program.name} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [python, PEERS / program.script, "convert", checkpoint, work / program.name],
        capture_output=True, text=True, check=False, env=environment(), timeout=LIMIT_S,
    )  # fmt: skip
    if done.returncode:
        raise FailedError(last_words(done.stderr))
    made = json.loads(done.stdout.splitlines()[-1])
    return [Entry(program, form, python, made[form]["path"], made[form]["bytes"]) for form in program.classes]


def last_words(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-2:])[-300:] or "it said nothing"


class Server:
    """A program that has its model open and answers in turn."""

    def __init__(self, entry: Entry, threads: int, log: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [entry.python, PEERS / entry.program.script, "serve", entry.path, entry.form, str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(),
            )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """Return the seconds to the first token and those for the others. Raises FailedError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise FailedError(last_words(self.log.read_text(errors="replace"))) from None
        line = self.process.stdout.readline()
        if not line:
            raise FailedError(last_words(self.log.read_text(errors="replace")))
        answer = json.loads(line)
        counts = [len(row) for row in answer["ids"]]
        if counts != [new_tokens] * len(prompts):
            raise FailedError(f"asked for {new_tokens} tokens of {len(prompts)} rows, it returned {counts}")
        return answer["first_s"], answer["rest_s"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure_cells(entries: list[Entry], *, vocab_size: int, threads: int, repeats: int, work: Path) -> None:
    """Measure the cells of one class, a program after the other in each round; the first round warms up."""
    rng = np.random.default_rng(0)
    servers = {id(entry): Server(entry, threads, work / f"{entry.program.name}-{entry.form}.log") for entry in entries}
    try:
        for repeat in range(repeats + 1):
            for cell, (tokens, rows, what) in CELLS.items():
                # New ones each time: a program may keep what it computed for a prompt.
                prompts = rng.integers(vocab_size, size=(rows, tokens)).tolist()
                for entry in entries:
                    if entry.failure:
                        continue
                    try:
                        new_tokens = 2 if what == "first" else NEW_TOKENS
                        first_s, rest_s = servers[id(entry)].generate(prompts, new_tokens)
                    except FailedError as error:
                        entry.failure = str(error)
                        continue
                    if repeat:
                        entry.add(cell, 1e3 * (first_s if what == "first" else rest_s / (NEW_TOKENS - 1)))
            print(f"  round {repeat} of {repeats}", file=sys.stderr, flush=True)
    finally:
        for server in servers.values():
            server.close()


def measure_start(entries: list[Entry], *, threads: int, repeats: int) -> None:
    """Measure a process that opens the model and prints one token: its time, and the most memory it had."""
    for repeat in range(repeats + 1):
        for entry in entries:
            if entry.failure:
                continue
            script = str(PEERS / entry.program.script)
            command = [entry.python, script, "start", entry.path, entry.form, str(threads), PROMPT]
            started = time.perf_counter()
            with tempfile.TemporaryFile("w+") as errors:  # not a pipe, which a talkative program would fill
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment())
                assert process.stdout is not None
                line = process.stdout.readline()
                seconds = time.perf_counter() - started
                peak, _ = process.communicate()
                errors.seek(0)
                said = errors.read()
            if not line or not peak:
                entry.failure = last_words(said)
            elif repeat:
                entry.add(START, seconds)
                entry.add(MEMORY, int(peak) / 1e6)


def table(kind: str, entries: list[Entry]) -> list[str]:
    """Return the rows of a class as Markdown, and below them how far each of ours is ahead of the best other."""
    cells = [*CELLS, START, MEMORY, DISK]
    lines = [f"| {kind} | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for entry in entries:
        if entry.failure:
            lines.append(f"| {entry.name} | failed: {entry.failure} |" + " |" * (len(cells) - 1))
            continue
        values = entry.values()
        shown = " | ".join(f"{values[cell]:.2f}" if cell == START else f"{values[cell]:.1f}" for cell in cells)
        lines.append(f"| {entry.name} | {shown} |")
    whole = [entry for entry in entries if not entry.failure]
    others = [entry.values() for entry in whole if entry.is_compared and not entry.is_ours]
    for entry in whole:
        if entry.is_ours and others:
            values = entry.values()
            ratios = " | ".join(f"{min(other[cell] for other in others) / values[cell]:.2f}×" for cell in cells)
            lines.append(f"| best other ÷ {entry.name} | {ratios} |")
    return lines


def draw(entries: list[Entry], path: Path) -> None:
    """Draw the cells of time as bars, a panel each."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [entry for entry in entries if not entry.failure]
    figure, axes = pyplot.subplots(2, 4, figsize=(22, 2 + 0.6 * len(shown)), sharey=True, constrained_layout=True)
    names = [entry.name for entry in shown]
    colours = ["tab:orange" if entry.is_ours else "tab:blue" for entry in shown]
    for axis, cell in zip(axes.flat, [*CELLS, START, MEMORY, DISK], strict=True):
        values = [entry.values()[cell] for entry in shown]
        axis.bar_label(axis.barh(names, values, color=colours), fmt="%.3g", padding=2)
        axis.set_title(cell)
        axis.margins(x=0.15)
    axes.flat[0].invert_yaxis()
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def make_checkpoint(folder: Path) -> Path:
    """Write a random GPT-2 small with GPT-2's vocabulary."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
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
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    pythons = {"ortgpt": sys.executable, "transformers": sys.executable}
    pythons |= dict(each.split("=", 1) for each in args.environments)
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
            missing[program.name] = "no environment was given"
            continue
        try:
            entries += convert(program, pythons[program.name], checkpoint, work)
        except (FailedError, OSError, subprocess.TimeoutExpired) as error:
            missing[program.name] = str(error)
    kinds = sorted({entry.kind for entry in entries})
    for kind in kinds:
        print(f"measuring {kind} ...", file=sys.stderr, flush=True)
        of_kind = [entry for entry in entries if entry.kind == kind]
        measure_cells(of_kind, vocab_size=config["vocab_size"], threads=args.threads, repeats=args.repeats, work=work)
        measure_start(of_kind, threads=args.threads, repeats=args.repeats)
    lines = [f"{platform.machine()}, {args.threads} threads, Python {platform.python_version()}, {args.repeats} rounds"]
    for kind in kinds:
        lines += ["", *table(kind, [entry for entry in entries if entry.kind == kind])]
    lines += ["", *(f"{name}: missing: {reason}" for name, reason in missing.items())]
    text = "\n".join(lines).strip()
    print(text)
    (work / "compare.md").write_text(text + "\n", encoding="utf-8")
    results: dict[str, Any] = {
        "missing": missing,
        "entries": [
            {"program": entry.program.name, "format": entry.form, "class": entry.kind, "failure": entry.failure,
             "medians": entry.values(), "samples": entry.samples}
            for entry in entries
        ],
    }  # fmt: skip
    (work / "compare.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(entries, work / "compare.png")


if __name__ == "__main__":
    main()
