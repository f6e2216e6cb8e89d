"""Interrupted writers: `python tests/faults.py [ROUNDS]` (default 5 of each kind), a few minutes.

An export, a quantisation and a training are ended at random moments by SIGKILL, by SIGINT, and by a limit on a file's
size, as a full disk ends them. Afterwards the old bundle has to be intact (it loads, and writes the text that it wrote
before), nothing half-written may be there under the name of a result, and a training that goes on has to end with the
weights of one that was never interrupted. Prints what was tried; exit code 1 where something was lost.
"""

from __future__ import annotations

import hashlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ortgpt
from support import TEXT, write_checkpoint

_KINDS = ("SIGKILL", "SIGINT", "full disk")


def main(rounds: int) -> int:
    chance = random.Random(0)
    lost: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for seed in (0, 1):
            write_checkpoint(work / f"checkpoint{seed}", seed=seed)
        run(["export", str(work / "checkpoint0"), "-o", str(work / "old")])
        export = ["export", str(work / "checkpoint1"), "-o", str(work / "out"), "--force"]
        quantize = ["quantize", str(work / "old"), "-o", str(work / "out"), "--dtype", "int8", "--force",
                    "--block-size", "16", "--max-perplexity-ratio", "2"]  # fmt: skip
        want = text_of(work / "old")
        for name, command in (("export", export), ("quantize", quantize)):
            length_s = timed(lambda command=command: run(command))  # type: ignore[misc]
            for kind in _KINDS:
                ended = 0
                for _ in range(rounds):
                    shutil.rmtree(work / "out", ignore_errors=True)
                    shutil.copytree(work / "old", work / "out")
                    ended += interrupt(command, kind, chance, length_s, 200_000)
                    found = text_of(work / "out")
                    if found not in (want, text_of_new(work, name, command)):
                        lost.append(f"{name}, {kind}: the bundle writes {found!r}")
                run(command)
                lost += [f"{name}, {kind}: {path.name} stays after the next run" for path in work.glob(".out.*")]
                print(f"{name}, {kind}: {rounds} times, {ended} of them ended before it was done")
        lost += check_training(work, rounds, chance)
    for each in lost:
        print(f"LOST: {each}")
    return 1 if lost else 0


def run(arguments: list[str], **options: object) -> int:
    command = [sys.executable, "-m", "ortgpt", *arguments]
    return subprocess.run(command, capture_output=True, check=False, **options).returncode  # type: ignore[call-overload, no-any-return]


def timed(function: Callable[[], object]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started


def interrupt(arguments: list[str], kind: str, chance: random.Random, length_s: float, largest: int) -> bool:
    """Run a command and end it at a random moment; tell whether it had not been done.

    A disk is full where a file grows beyond a random part of `largest`, in bytes.
    """
    if kind == "full disk":
        limit = chance.randrange(largest)
        return run(arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) != 0
    command = [sys.executable, "-m", "ortgpt", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(length_s * chance.random())
    process.send_signal(signal.SIGKILL if kind == "SIGKILL" else signal.SIGINT)
    return process.wait() != 0


def text_of(bundle: Path) -> str:
    with ortgpt.load(bundle) as generator:
        return generator.generate("It is a truth", max_new_tokens=20).text


_new_texts: dict[str, str] = {}


def text_of_new(work: Path, name: str, command: list[str]) -> str:
    """Return what the bundle writes that the command makes when it is left alone."""
    if name not in _new_texts:
        made = work / f"new-{name}"
        run([str(made) if each == str(work / "out") else each for each in command])
        _new_texts[name] = text_of(made)
    return _new_texts[name]


def check_training(work: Path, rounds: int, chance: random.Random) -> list[str]:
    (work / "text.txt").write_text(TEXT * 8, encoding="utf-8")
    command = ["train", str(work / "text.txt"), "-o", str(work / "trained"), "--n-layer", "1", "--n-head", "2",
               "--n-embd", "32", "--n-positions", "32", "--vocab-size", "300", "--steps", "300", "--batch-size", "4",
               "--evaluate-every", "20"]  # fmt: skip
    length_s = timed(lambda: run(command))
    want = weights_of(work / "trained")
    lost = []
    largest = 12 * (work / "trained" / "model.safetensors").stat().st_size  # twice what a state of the training has
    for kind in _KINDS:
        ended = 0
        for _ in range(rounds):
            shutil.rmtree(work / "trained")
            while not (work / "trained").exists():
                ended += interrupt(command, kind, chance, length_s, largest)
            if weights_of(work / "trained") != want:
                lost.append(f"train, {kind}: other weights than those of an uninterrupted run")
            lost += [f"train, {kind}: {path.name} stays" for path in work.glob("*trained?*")]
        print(f"train, {kind}: {rounds} times begun, {ended} times interrupted and gone on with, to the same weights")
    return lost


def weights_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
