"""A short run of checks/fuzz/run.py: damaged bundles are refused with an error of the package, or read as before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import ortgpt
from fuzz.mutations import TEXT_FILES
from fuzz.reader import ACCEPTED, FINDING, Reader
from fuzz.run import Report, try_bundles, try_files


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


def test_mutated_files(reader: Reader, small_bundle: Path, tmp_path: Path) -> None:
    report = Report()
    assert list(try_files(reader, small_bundle, tmp_path / "work", range(400), report)) == []
    assert set(report.tallies) == set(TEXT_FILES)
    for name, tally in report.tallies.items():
        assert tally.answers[ACCEPTED] > 0, name
        assert tally.answers["BundleError"] > 10, name


def test_mutated_bundles(reader: Reader, small_bundle: Path, small_portable: ortgpt.Generator, tmp_path: Path) -> None:
    report = Report()
    bundles = {"native": small_bundle, "portable": small_portable.bundle.path}
    assert list(try_bundles(reader, bundles, tmp_path / "work", range(25), report)) == []
    assert report.count(ACCEPTED) > 0
    assert report.count("BundleError") > 5


def test_an_unexpected_answer_is_a_finding() -> None:
    report = Report()
    for expected, answer in (
        ("any", (FINDING, "bundle.py:1 f(): KeyError: 'x'")),
        ("refused", (ACCEPTED, "[1]")),
        ("same", (ACCEPTED, "[2]")),
    ):
        assert report.note("kind", "seed 1", expected, "[1]", answer)
    for expected, answer in (("any", (ACCEPTED, "[2]")), ("same", (ACCEPTED, "[1]")), ("refused", ("BundleError", ""))):
        assert report.note("kind", "seed 1", expected, "[1]", answer) is None
    assert len(report.findings) == report.count(FINDING) == 3


def test_a_process_that_dies_is_named_and_replaced(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.reader.LIMIT_S", 0.0)
    reader = Reader()
    try:
        assert reader.ask("bundle", small_bundle) == (FINDING, "no answer in 0 s")
        monkeypatch.undo()
        assert reader.ask("bundle", small_bundle)[0] == ACCEPTED
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGKILL)
        assert reader.ask("bundle", small_bundle) == (FINDING, "the process died: SIGKILL")
        assert reader.ask("bundle", small_bundle)[0] == ACCEPTED
    finally:
        reader.close()
