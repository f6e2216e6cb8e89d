"""Interrupted writers: `unshare --user --map-root-user --mount python tests/faults.py [ROUNDS]`, some minutes.

An export, a quantisation and a training are ended at random moments by SIGKILL, by SIGINT and by a full disk (a small
tmpfs, which the mounts of a namespace of its own allow anybody), ROUNDS times each (default 5); of the exports and
quantisations every other one is to replace a bundle. Afterwards a bundle that was there has to write the text that it
wrote before, or be the new one, whole; nothing half-written may have the name of a result, and nothing at all may stay
but what SIGKILL leaves, and that not after the next run. A training has to go on from where it was, and to end with the
weights of one that was never interrupted. Prints what was interrupted; exit code 1 where something was lost, or where
too few interruptions came before the end.
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
from support import TEXT, write_checkpoint

_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT}
_KINDS = (*_SIGNALS, "full disk")


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
    for each in lost:
        print(f"LOST: {each}")
    return 1 if lost else 0


def check_bundles(
    name: str, command: Callable[[Path], list[str]], old: Path, work: Path, rounds: int, chance: random.Random
) -> list[str]:
    new = work / f"new-{name}"
    length_s = timed(lambda: must_run(command(new)))
    old_text, new_text = text_of(old), text_of(new)
    lost = []
    for kind in _KINDS:
        ended = 0
        for number in range(4 * rounds):
            if ended == rounds:
                break
            with place(work / "place", small=kind == "full disk") as resize:
                out = work / "place" / "out"
                if number % 2:
                    shutil.copytree(old, out)
                resize(size_of(out) + chance.randrange(size_of(new)))
                ended += interrupted(command(out), kind, length_s, chance)
                found = text_of(out) if out.exists() else None
                if found not in (old_text if number % 2 else None, new_text):
                    lost.append(f"{name}, {kind}: the bundle writes {found!r}")
                debris = [path.name for path in out.parent.iterdir() if path != out]
                if kind != "SIGKILL":
                    lost += [f"{name}, {kind}: {each} stays" for each in debris]
                elif debris:
                    must_run(command(out))
                    lost += [f"{name}, {kind}: {path.name} stays after the next run" for path in out.parent.glob(".*")]
        lost += [f"{name}, {kind}: only {ended} came before the end"] if ended < rounds else []
        print(f"{name}, {kind}: {ended} interrupted")
    return lost


def check_training(work: Path, rounds: int, chance: random.Random) -> list[str]:
    text = work / "text.txt"
    text.write_text(TEXT * 8, encoding="utf-8")

    def train(out: Path) -> list[str]:
        return ["train", str(text), "-o", str(out), "--n-layer", "1", "--n-head", "2", "--n-embd", "32",
                "--n-positions", "32", "--vocab-size", "300", "--steps", "1500", "--batch-size", "4",
                "--save-every", "25"]  # fmt: skip

    length_s = timed(lambda: must_run(train(work / "trained")))
    want = weights_of(work / "trained")
    lost = []
    for kind in _KINDS:
        ended = gone_on = 0
        for _ in range(rounds):
            with place(work / "place", small=kind == "full disk") as resize:
                out = work / "place" / "trained"
                room = size_of(work / "trained")
                while not out.exists():
                    room += chance.randrange(2 * size_of(work / "trained"))
                    resize(room)
                    began = (out.parent / "trained.training" / "state.pt").exists()
                    said: list[str] = []
                    ended += interrupted(train(out), kind, length_s, chance, said)
                    gone_on += began and "goes on from step" in "".join(said)
                if weights_of(out) != want:
                    lost.append(f"train, {kind}: other weights than those of an uninterrupted run")
                must_end = [path.name for path in out.parent.iterdir() if path != out]
                lost += [f"train, {kind}: {each} stays" for each in must_end]
        lost += [] if ended and gone_on else [f"train, {kind}: {ended} interrupted, {gone_on} gone on with"]
        print(f"train, {kind}: {rounds} begun, {ended} times interrupted, {gone_on} times gone on with")
    return lost


@contextmanager
def place(folder: Path, *, small: bool) -> Iterator[Callable[[int], None]]:
    """Make a folder that is gone afterwards; yields what sets the size in bytes of its disk, if that is `small`."""
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


def interrupted(
    arguments: list[str], kind: str, length_s: float, chance: random.Random, said: list[str] | None = None
) -> bool:
    """Run a command, send a signal at a random moment behind its imports; tell whether it had not been done by then.

    What it says goes to `said`.
    """
    # A shell that runs this in the background has SIGINT ignored, and its children inherit that.
    process = subprocess.Popen(
        [sys.executable, "-m", "ortgpt", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    if kind in _SIGNALS:
        time.sleep(length_s * chance.uniform(0.4, 1))
        process.send_signal(_SIGNALS[kind])
    _, errors = process.communicate()
    if said is not None:
        said.append(errors)
    return process.returncode != 0


def must_run(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "ortgpt", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{arguments} failed by itself: {done.stderr}")


def timed(function: Callable[[], object]) -> float:
    started = time.monotonic()
    function()
    return time.monotonic() - started


def size_of(folder: Path) -> int:
    """Return what the files of a folder take, in bytes, in whole pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.glob("*"))


def text_of(bundle: Path) -> str:
    with ortgpt.load(bundle) as generator:
        return generator.generate("It is a truth", max_new_tokens=20).text


def weights_of(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
