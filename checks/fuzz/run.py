"""Give damaged bundles to the reader: run.py [--files N] [--bundles M] [--seed S].

Every input has to be refused by an error of the package, or accepted: as what the undamaged one is, unless a manifest
vouches for the change. Anything else is a finding: another exception, more than 5 seconds, more than 1 GB of memory,
words that Python prints, the end of the process. A finding is printed with its seed, which makes it again: with
`--files 1 --bundles 0`, or the reverse. Prints a table; exits with 1 when there is a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import ortgpt  # noqa: E402  # as the next
from fuzz.bundles import Entry, Fifo, Files, Folder, Link, mutate_bundle  # noqa: E402  # needs the path above
from fuzz.mutations import ANY, REFUSED, TEXT_FILES, mutate_text  # noqa: E402  # as above
from fuzz.values import MANIFEST  # noqa: E402  # as above
from ortgpt import OrtGptError  # noqa: E402  # as above
from ortgpt.bundle.checked_json import read_json_object  # noqa: E402  # as above
from ortgpt.bundle.folder import open_bundle
from ortgpt.bundle.model_config import ModelConfig  # noqa: E402  # as above
from ortgpt.cli.report import info_lines
from ortgpt.options.generation_config import read_generation_config  # noqa: E402  # as above
from ortgpt.options.generation_options import GenerationOptions  # noqa: E402  # as above
from ortgpt.text.tokenizer import Tokenizer  # noqa: E402  # as above
from ortgpt.tools.seal import seal_bundle  # noqa: E402  # as above

BUNDLE = "bundle"  # what is read where it is no single file
LIMIT_S = 5.0
START_S = 60.0  # until a new process has imported everything
LIMIT_BYTES = 2**30
ADDRESS_SPACE_BYTES = 12 * 2**30  # that a process without end takes no more of the machine
TEXT = "It is a truth universally acknowledged; whatever is known,"  # 39 tokens: enough for a prefill graph
ACCEPTED, FAULT = "accepted", "finding"

Answer = tuple[str, str]  # ACCEPTED, FAULT or the name of an error; and what was read, or what went wrong


# In the process that reads


def read_input(kind: str, folder: Path) -> str:
    """Read what is in the folder as an app would, and return what came of it as a text."""
    if kind == MANIFEST:
        bundle = open_bundle(folder)
        info_lines(bundle)
        seal_bundle(folder)
        assert open_bundle(folder).config == bundle.config, "a seal that changes the bundle"
        return repr(bundle.manifest)
    if kind == "config.json":
        return repr(ModelConfig.from_dict(read_json_object(folder / kind)))
    if kind == "generation_config.json":
        defaults = read_generation_config(read_json_object(folder / kind), (0,))
        return repr(GenerationOptions(max_new_tokens=3).resolve(defaults))
    if kind in ("vocab.json", "merges.txt"):
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode(TEXT)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids), "ids beyond the vocabulary"
        assert tokenizer.decode(ids) == TEXT, "a text that does not come back"
        return repr(ids)
    with ortgpt.load(folder, verify="sha256", threads=1) as generator:
        done = generator.generate(TEXT, max_new_tokens=3)
        limit = generator.bundle.config.vocab_size
        assert all(0 <= token_id < limit for token_id in done.token_ids), "ids beyond the vocabulary"
        return repr(done.token_ids)


def answer(kind: str, folder: Path) -> Answer:
    """Read an input; an error of the package is its name, any other a fault."""
    before, printed = _begin_peak(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            found: Answer = (ACCEPTED, read_input(kind, folder))
    except OrtGptError as error:
        whole = str(error).encode("utf-8", "backslashreplace").decode()
        found = (
            (type(error).__name__, "") if whole == str(error) else (FAULT, f"a message that is no text: {whole[:300]}")
        )
    except BaseException as error:  # noqa: BLE001  # a panic of Rust code is no Exception
        found = (FAULT, f"{_place_of(error)}: {type(error).__name__}: {str(error)[:200]!a}")
    grown = _peak_bytes() - before
    if printed.getvalue():
        found = (FAULT, f"printed {printed.getvalue()[:200]!a}")
    return (FAULT, f"{grown / 2**20:.0f} MiB of memory") if grown > LIMIT_BYTES else found


def serve(connection: Connection) -> None:
    """Answer what is asked until the other end closes."""
    logging.getLogger("ortgpt").addHandler(logging.NullHandler())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ONNX Runtime's own words
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    connection.send(("ready", ""))
    while True:
        try:
            kind, folder = connection.recv()
        except EOFError:
            return
        connection.send(answer(kind, Path(folder)))


def _begin_peak() -> int:
    """Let the peak of resident memory count from now on, which Linux allows; return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _place_of(error: BaseException) -> str:
    """Return the innermost place within the package that an exception passed."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "ortgpt" in Path(frame.filename).parts] or frames
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno} {inside[-1].name}()"


# In the process that asks


class Reader:
    """A process that reads inputs, started anew when it has died or was stopped."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def ask(self, kind: str, folder: Path) -> Answer:
        """Return what the process makes of an input, or how it ended."""
        found = self._exchange(self._connected(), (kind, str(folder)), LIMIT_S)
        if found[0] == FAULT:
            self.close()  # what it took, or half did, is no matter of the next input
        return found

    @property
    def pid(self) -> int | None:
        """The id of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _connected(self) -> Connection:
        if self._connection is None:
            mine, theirs = self._context.Pipe()
            self._process = self._context.Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._connection = mine
            ready = self._exchange(mine, None, START_S)
            assert ready[0] == "ready", ready
        return self._connection

    def _exchange(self, connection: Connection, question: tuple[str, str] | None, limit_s: float) -> Answer:
        assert self._process is not None
        try:
            if question is not None:
                connection.send(question)
            if connection.poll(limit_s):
                kind, text = connection.recv()
                return str(kind), str(text)
        except (EOFError, ConnectionError):
            self._process.join(LIMIT_S)
            code = self._process.exitcode or 0
            return FAULT, f"the process died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        return FAULT, f"no answer in {limit_s:g} s"


@dataclass
class Tally:
    """What came of the inputs of one kind."""

    answers: Counter[str] = field(default_factory=Counter)

    def line(self, kind: str) -> str:
        """Return the row of the table."""
        refused = {name: count for name, count in sorted(self.answers.items()) if name not in (ACCEPTED, FAULT)}
        shown = ", ".join(f"{name} {count}" for name, count in refused.items()) or "none"
        return (
            f"{kind:<34} {self.answers.total():>6} tried  {self.answers[ACCEPTED]:>6} accepted  "
            f"{self.answers[FAULT]:>4} findings  refused: {shown}"
        )


@dataclass
class Report:
    """The findings, and a tally for each kind of input."""

    findings: list[str] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)

    def note(self, kind: str, source: str, expected: str, whole: str, found: Answer) -> str | None:
        """Count an answer; return the finding that it is, if it is one."""
        verdict, detail = found
        if verdict == ACCEPTED and expected == REFUSED:
            verdict, detail = FAULT, f"accepted, and read as {detail[:200]}"
        elif verdict == ACCEPTED and expected != ANY and detail != whole:
            verdict, detail = FAULT, f"accepted, and not as the undamaged one: {detail[:200]}"
        self.tallies.setdefault(kind, Tally()).answers[verdict] += 1
        if verdict != FAULT:
            return None
        self.findings.append(f"finding: {source}: {detail}")
        return self.findings[-1]

    def count(self, verdict: str) -> int:
        """Return how many inputs of all kinds had this answer."""
        return sum(tally.answers[verdict] for tally in self.tallies.values())


def try_files(reader: Reader, bundle: Path, work: Path, seeds: Iterable[int], report: Report) -> Iterator[str]:
    """Give one mutated file for each seed to what reads it; yield each finding."""
    shutil.copytree(bundle, work)
    whole = {name: ((work / name).read_bytes(), reader.ask(name, work)) for name in TEXT_FILES}
    assert all(found[0] == ACCEPTED for _, found in whole.values()), whole
    for seed in seeds:
        rng = Random(seed)
        name = rng.choice(TEXT_FILES)
        data, (_, undamaged) = whole[name]
        mutated = mutate_text(rng, name, data)
        (work / name).write_bytes(mutated.data)
        finding = report.note(
            name, f"seed {seed}, {name}, {mutated.name}", mutated.expected, undamaged, reader.ask(name, work)
        )
        if finding is not None:
            yield finding
        (work / name).write_bytes(data)


def try_bundles(
    reader: Reader, bundles: Mapping[str, Path], work: Path, seeds: Iterable[int], report: Report
) -> Iterator[str]:
    """Load one mutated bundle for each seed and let it write three tokens; yield each finding."""
    contents = {
        flavour: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        for flavour, folder in bundles.items()
    }
    undamaged = {flavour: reader.ask(BUNDLE, folder) for flavour, folder in bundles.items()}
    assert all(found[0] == ACCEPTED for found in undamaged.values()), undamaged
    for seed in seeds:
        rng = Random(seed)
        flavour = rng.choice(sorted(bundles))
        mutated = mutate_bundle(rng, contents[flavour])
        write_bundle(work, mutated.files)
        finding = report.note(
            f"bundle: {mutated.name}",
            f"seed {seed}, {flavour} bundle, {mutated.name}",
            mutated.expected,
            undamaged[flavour][1],
            reader.ask(BUNDLE, work / BUNDLE),
        )
        if finding is not None:
            yield finding
        shutil.rmtree(work)


def write_bundle(work: Path, files: Files) -> None:
    """Write a bundle into a folder of `work`, and beside it what its links lead to."""
    (work / BUNDLE).mkdir(parents=True)
    for index, (name, entry) in enumerate(files.items()):
        _write(work / BUNDLE / name, entry, work / f"outside-{index}")


def _write(path: Path, entry: Entry, outside: Path) -> None:
    if isinstance(entry, bytes):
        path.write_bytes(entry)
    elif isinstance(entry, Folder):
        path.mkdir()
    elif isinstance(entry, Fifo):
        os.mkfifo(path)
    elif isinstance(entry, Link) and entry.outside is not None:
        outside.write_bytes(entry.outside)
        path.symlink_to(outside)
    else:
        path.symlink_to(entry.target)


def make_bundles(folder: Path) -> dict[str, Path]:
    """Export a small random checkpoint in both flavours."""
    # The process that reads imports this module, too, and needs no torch.
    from ortgpt_exporter import export_bundle
    from support import write_checkpoint

    checkpoint = write_checkpoint(folder / "checkpoint")
    return {
        flavour: export_bundle(checkpoint, folder / flavour, flavour=flavour).path for flavour in ("native", "portable")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Give damaged bundles to the reader.")
    parser.add_argument("--files", type=int, default=20_000, help="mutated files (default 20000)")
    parser.add_argument("--bundles", type=int, default=500, help="mutated bundles (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first input; each has the next (default 0)")
    given = parser.parse_args()
    report, started = Report(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, reader = Path(name), Reader()
        bundles = make_bundles(folder)
        try:
            files = range(given.seed, given.seed + given.files)
            for finding in try_files(reader, bundles["native"], folder / "file", files, report):
                _say(finding)
            loads = range(given.seed, given.seed + given.bundles)
            for finding in try_bundles(reader, bundles, folder / "damaged", loads, report):
                _say(finding)
        finally:
            reader.close()
    for kind, tally in sorted(report.tallies.items()):
        _say(tally.line(kind))
    _say(f"{len(report.findings)} findings in {time.monotonic() - started:.0f} s")
    return 1 if report.findings else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # its table


if __name__ == "__main__":
    sys.exit(main())
