"""Interrupt writers: `unshare --user --map-root-user --mount python checks/faults.py [ROUNDS]`, some minutes.

Ends an export, a quantisation and a training at random moments by SIGKILL, by SIGINT and by a full disk (a small tmpfs,
which needs the mount namespace), ROUNDS times each (default 5). Every other export and quantisation replaces a bundle.
Afterwards the folder has to hold the old bundle or the whole new one, each with its own text. Nothing else may remain,
except that the next run may clean up after SIGKILL. A training has to resume from its last saved step, and to end with
the weights of an uninterrupted one. Prints what was interrupted; exits with 1 if something was lost, or if too few
interruptions came before the end.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ortgpt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import TEXT, write_checkpoint  # needs the path above

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT}
KINDS = (*SIGNALS, "full disk")


def main(rounds: int) -> int:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for seed in (0, 1):
            write_checkpoint(work / f"checkpoint{seed}", seed=seed)
        old = work / "old"
        must_run(["export", str(work / "checkpoint0"), "-o", str(old)])

        def export(out: Path) -> list[str]:
            return ["export", str(work / "checkpoint1"), "-o", str(out), "--force"]

        def quantize(out: Path) -> list[str]:
            return ["quantize", str(old), "-o", str(out), "--force", "--dtype", "int8", "--block-size", "16",
                    "--max-perplexity-ratio", "2"]  # fmt: skip

        lost = check_bundles("export", export, old, work, rounds, chance)
        lost += check_bundles("quantize", quantize, old, work, rounds, chance)
        lost += check_training(work, rounds, chance)
    for loss in lost:
        print(f"LOST: {loss}")
    return 1 if lost else 0


def check_bundles(
    name: str, command: Callable[[Path], list[str]], old: Path, work: Path, rounds: int, chance: random.Random
) -> list[str]:
    new = work / f"new-{name}"
    duration_s = timed(lambda: must_run(command(new)))
    old_text, new_text = text_of(old), text_of(new)
    lost = []
    for kind in KINDS:
        interruptions = 0
        for number in range(4 * rounds):
            if interruptions == rounds:
                break
            with new_folder(work / "place", small=kind == "full disk") as resize:
                out = work / "place" / "out"
                if number % 2:
                    shutil.copytree(old, out)
                resize(size_of(out) + chance.randrange(size_of(new)))
                was_interrupted, _ = interrupt(command(out), kind, duration_s, chance)
                interruptions += was_interrupted
                if not was_interrupted:
                    duration_s *= 0.8  # the machine may have less to do than at the start
                text = text_of(out) if out.exists() else None
                if text not in (old_text if number % 2 else None, new_text):
                    lost.append(f"{name}, {kind}: the bundle writes {text!r}")
                remains = others(out)
                if kind == "SIGKILL" and remains:
                    must_run(command(out))
                    remains = others(out)
                lost += [f"{name}, {kind}: {path.name} remains" for path in remains]
        if interruptions < rounds:
            lost.append(f"{name}, {kind}: only {interruptions} interruptions came before the end")
        print(f"{name}, {kind}: {interruptions} interrupted", flush=True)
    return lost


def check_training(work: Path, rounds: int, chance: random.Random) -> list[str]:
    text = work / "text.txt"
    text.write_text(TEXT * 8, encoding="utf-8")

    def train(out: Path) -> list[str]:
        return ["train", str(text), "-o", str(out), "--n-layer", "1", "--n-head", "2", "--n-embd", "32",
                "--n-positions", "32", "--vocab-size", "300", "--steps", "1500", "--batch-size", "4",
                "--save-every", "25"]  # fmt: skip

    duration_s = timed(lambda: must_run(train(work / "trained")))
    expected = weights_of(work / "trained")
    lost = []
    for kind in KINDS:
        interruptions = resumed = 0
        for _ in range(rounds):
            with new_folder(work / "place", small=kind == "full disk") as resize:
                out = work / "place" / "trained"
                disk_bytes = size_of(work / "trained")
                while not out.exists():
                    disk_bytes += chance.randrange(2 * size_of(work / "trained"))
                    resize(disk_bytes)
                    has_state = (out.parent / "trained.training" / "state.pt").exists()
                    was_interrupted, errors = interrupt(train(out), kind, duration_s, chance)
                    interruptions += was_interrupted
                    if not was_interrupted:
                        duration_s *= 0.8
                    resumed += has_state and "resumes at step" in errors
                if weights_of(out) != expected:
                    lost.append(f"train, {kind}: the weights differ from those of an uninterrupted run")
                lost += [f"train, {kind}: {path.name} remains" for path in others(out)]
        summary = f"train, {kind}: {rounds} trainings, {interruptions} interruptions, {resumed} resumed"
        lost += [] if interruptions and resumed else [summary]
        print(summary, flush=True)
    return lost


@contextmanager
def new_folder(folder: Path, *, small: bool) -> Iterator[Callable[[int], None]]:
    """Make a folder and remove it afterwards; with `small` it has a disk, whose size in bytes the yielded call sets."""
    folder.mkdir()
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)

    def resize(size_bytes: int) -> None:
        if small:
            subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(folder)], check=True)

    try:
        yield resize
    finally:
        if small:
            subprocess.run(["umount", str(folder)], check=True)
        shutil.rmtree(folder)


def interrupt(arguments: list[str], kind: str, duration_s: float, chance: random.Random) -> tuple[bool, str]:
    """Run a command, with a signal at a random moment after its imports; return whether it failed, and its errors."""
    # A shell that runs this in the background ignores SIGINT, which its children inherit.
    process = subprocess.Popen(
        [sys.executable, "-m", "ortgpt", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=duration_s * chance.uniform(0.4, 1) if kind in SIGNALS else None)
    except subprocess.TimeoutExpired:
        process.send_signal(SIGNALS[kind])
        _, errors = process.communicate()
    return process.returncode != 0, errors


def must_run(arguments: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", "ortgpt", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{arguments} failed without an interruption: {result.stderr}")


def timed(function: Callable[[], object]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started


def size_of(folder: Path) -> int:
    """Return the bytes that the files of a folder take, in whole pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.glob("*"))


def others(out: Path) -> list[Path]:
    """Return what else is in the folder of `out`."""
    return [path for path in out.parent.iterdir() if path != out]


def text_of(bundle: Path) -> str:
    with ortgpt.load(bundle) as generator:
        return generator.generate("It is a truth", max_new_tokens=20).text


def weights_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
