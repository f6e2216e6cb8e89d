"""Give damaged bundles to the reader: `python checks/fuzz/run.py [--files N] [--bundles M] [--seed S]`.

Every input has to be refused with an error of the package, or be accepted and read as the undamaged one, unless a
manifest vouches for the change. Everything else is a finding: another exception, more than 5 seconds, more than 1 GB of
memory, output to the terminal, the end of the process. A finding is printed with its seed; to repeat it, run that seed
with `--files 1 --bundles 0`, or the reverse. Prints a table; exits with 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
# These need the paths above.
from fuzz.bundles import Entry, Fifo, Files, Folder, Link, mutate_bundle
from fuzz.mutations import ANY, REFUSED, TEXT_FILES, mutate_text
from fuzz.reader import ACCEPTED, BUNDLE, FINDING, Answer, Reader


@dataclass
class Tally:
    """What came of the inputs of one kind."""

    answers: Counter[str] = field(default_factory=Counter)

    def line(self, kind: str) -> str:
        """Return the row of the table."""
        refused = {name: count for name, count in sorted(self.answers.items()) if name not in (ACCEPTED, FINDING)}
        shown = ", ".join(f"{name} {count}" for name, count in refused.items()) or "none"
        return (
            f"{kind:<34} {self.answers.total():>6} tried  {self.answers[ACCEPTED]:>6} accepted  "
            f"{self.answers[FINDING]:>4} findings  refused: {shown}"
        )


@dataclass
class Report:
    """The findings, and a tally for each kind of input."""

    findings: list[str] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)

    def note(self, kind: str, source: str, expected: str, undamaged: str, answer: Answer) -> str | None:
        """Count an answer; if it is a finding, return its text."""
        verdict, detail = answer
        if verdict == ACCEPTED and expected == REFUSED:
            verdict, detail = FINDING, f"accepted, and read as {detail[:200]}"
        elif verdict == ACCEPTED and expected != ANY and detail != undamaged:
            verdict, detail = FINDING, f"accepted, but not read as the undamaged one: {detail[:200]}"
        self.tallies.setdefault(kind, Tally()).answers[verdict] += 1
        if verdict != FINDING:
            return None
        self.findings.append(f"finding: {source}: {detail}")
        return self.findings[-1]

    def count(self, verdict: str) -> int:
        """Return how many inputs of all kinds had this answer."""
        return sum(tally.answers[verdict] for tally in self.tallies.values())


def try_files(reader: Reader, bundle: Path, work: Path, seeds: Iterable[int], report: Report) -> Iterator[str]:
    """Read one mutated file for each seed; yield each finding."""
    shutil.copytree(bundle, work)
    originals = {name: ((work / name).read_bytes(), reader.ask(name, work)) for name in TEXT_FILES}
    assert all(answer[0] == ACCEPTED for _, answer in originals.values()), originals
    for seed in seeds:
        rng = Random(seed)
        name = rng.choice(TEXT_FILES)
        data, (_, undamaged) = originals[name]
        mutated = mutate_text(rng, name, data)
        (work / name).write_bytes(mutated.data)
        source = f"seed {seed}, {name}, {mutated.name}"
        finding = report.note(name, source, mutated.expected, undamaged, reader.ask(name, work))
        if finding is not None:
            yield finding
        (work / name).write_bytes(data)


def try_bundles(
    reader: Reader, bundles: Mapping[str, Path], work: Path, seeds: Iterable[int], report: Report
) -> Iterator[str]:
    """Load one mutated bundle for each seed, and generate three tokens with it; yield each finding."""
    contents = {
        flavour: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        for flavour, folder in bundles.items()
    }
    undamaged = {flavour: reader.ask(BUNDLE, folder) for flavour, folder in bundles.items()}
    assert all(answer[0] == ACCEPTED for answer in undamaged.values()), undamaged
    for seed in seeds:
        rng = Random(seed)
        flavour = rng.choice(sorted(bundles))
        mutated = mutate_bundle(rng, contents[flavour])
        write_bundle(work, mutated.files)
        kind, source = f"bundle: {mutated.name}", f"seed {seed}, {flavour} bundle, {mutated.name}"
        answer = reader.ask(BUNDLE, work / BUNDLE)
        finding = report.note(kind, source, mutated.expected, undamaged[flavour][1], answer)
        if finding is not None:
            yield finding
        shutil.rmtree(work)


def write_bundle(work: Path, files: Files) -> None:
    """Write a bundle into a folder of `work`, and beside it the files that its links lead to."""
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
    # Imported here, since the process that reads imports this module as well, and needs no torch.
    from ortgpt_exporter import export_bundle
    from support import write_checkpoint

    checkpoint = write_checkpoint(folder / "checkpoint")
    return {
        flavour: export_bundle(checkpoint, folder / flavour, flavour=flavour).path for flavour in ("native", "portable")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000, help="mutated files (default 20000)")
    parser.add_argument("--bundles", type=int, default=500, help="mutated bundles (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first input; each has the next (default 0)")
    args = parser.parse_args()
    report, started = Report(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, reader = Path(name), Reader()
        bundles = make_bundles(folder)
        try:
            files = range(args.seed, args.seed + args.files)
            for finding in try_files(reader, bundles["native"], folder / "file", files, report):
                print(finding, flush=True)
            loads = range(args.seed, args.seed + args.bundles)
            for finding in try_bundles(reader, bundles, folder / "damaged", loads, report):
                print(finding, flush=True)
        finally:
            reader.close()
    for kind, tally in sorted(report.tallies.items()):
        print(tally.line(kind))
    print(f"{len(report.findings)} findings in {time.monotonic() - started:.0f} s")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
