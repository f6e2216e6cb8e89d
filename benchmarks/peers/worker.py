"""The side of `benchmarks/compare.py` that runs in the environment of a program. Needs no package but the program.

    SCRIPT convert CHECKPOINT WORK      writes the model in each format; prints {format: {"path": …, "bytes": …}}
    SCRIPT serve PATH FORMAT THREADS    answers each {"prompts": …, "new_tokens": …} on standard input, a JSON a line
    SCRIPT start PATH FORMAT THREADS TEXT IDS   opens the model, prints the first token after TEXT and its peak memory,
                                        then computes the prompt IDS, a JSON list, and prints the peak again

Everything that a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from timing import peak_bytes  # compare.py puts its folder on the path

Ids = list[list[int]]
Convert = Callable[[Path, Path], dict[str, Path]]


class Model(Protocol):
    """An open model. Rows of a batch have equal length; decoding is greedy and does not stop at end-of-text."""

    def generate(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float, float]:
        """Return the new ids of each row, the seconds to the first token, and those for all other tokens."""

    def first_token(self, text: str) -> str:
        """Return the token after a text, as text, or as its id if the program has no tokenizer."""


class Clock:
    """The time of the first of several tokens, for programs that call back on each."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first = 0.0

    def tick(self) -> None:
        if not self.first:
            self.first = time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.started

    def split(self) -> tuple[float, float]:
        """Return the seconds from the start to the first token, and from there to now."""
        return self.first - self.started, time.perf_counter() - self.first


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def main(convert: Convert, open_model: Callable[[Path, str, int], Model]) -> None:
    """Do what the command line says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries in C print there, too
    if sys.argv[1] == "convert":
        checkpoint, work = map(Path, sys.argv[2:])
        work.mkdir(parents=True, exist_ok=True)
        paths = convert(checkpoint, work)
        models = {name: {"path": str(path), "bytes": size_of(path)} for name, path in paths.items()}
        print(json.dumps(models), file=answers)
        return
    command, path, format_name, threads, *rest = sys.argv[1:]
    model = open_model(Path(path), format_name, int(threads))
    if command == "start":
        print(json.dumps(model.first_token(rest[0])), file=answers, flush=True)
        print(peak_bytes(), file=answers, flush=True)
        model.generate([json.loads(rest[1])], 2)
        print(peak_bytes(), file=answers, flush=True)
        return
    for line in sys.stdin:
        ids, first_s, rest_s = model.generate(**json.loads(line))
        print(json.dumps({"ids": ids, "first_s": first_s, "rest_s": rest_s}), file=answers, flush=True)
