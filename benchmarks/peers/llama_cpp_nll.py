"""Write a GPT-2 checkpoint as GGUF, quantise it with llama.cpp, and score rows of token ids with each file.

llama_cpp_nll.py CHECKPOINT WORK_FOLDER THREADS, rows as JSON on standard input, results as JSON on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp_model import convert


def score(path: Path, rows: list[list[int]], threads: int) -> float:
    """Return the summed negative log-likelihood, in nats, of every id but the first of each row."""
    llm = llama_cpp.Llama(
        str(path), n_ctx=max(map(len, rows)), n_batch=max(map(len, rows)), n_threads=threads, n_threads_batch=threads,
        logits_all=True, verbose=False,
    )  # fmt: skip
    nll = 0.0
    for row in rows:
        llm.reset()
        llm.eval(row[:-1])
        logits = np.array(llm.scores[: len(row) - 1], dtype=np.float64)
        largest = logits.max(1)
        normaliser = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
        nll += float((normaliser - logits[np.arange(len(row) - 1), row[1:]]).sum())
    return nll


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discard what llama.cpp writes to standard output and standard error."""
    originals = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(originals[0], 1)
            os.dup2(originals[1], 2)


def main() -> None:
    checkpoint, work, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rows = json.load(sys.stdin)
    results = {}
    with silenced():
        for name, path in convert(checkpoint, work).items():
            results[name] = {"nll": score(path, rows, threads), "bytes": path.stat().st_size}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
