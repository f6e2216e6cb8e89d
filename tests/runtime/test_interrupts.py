"""Ctrl-C, the end of the process and errors while a bundle loads that takes minutes to hash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ortgpt
from ortgpt import BundleError
from ortgpt.background import Background
from ortgpt.bundle.folder import open_bundle
from ortgpt.ort.session import plan_session
from support import reseal

SIZE = 2**40  # of holes: nothing on the disk, and minutes to read
LIMIT_S = 60

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which files a process reads")


@pytest.fixture
def endless(small_bundle: Path, tmp_path: Path) -> Path:
    """A bundle with a file that takes minutes to read."""
    bundle = Path(shutil.copytree(small_bundle, tmp_path / "bundle"))
    with (bundle / "large.bin").open("wb") as file:
        try:
            file.truncate(SIZE)
        except OSError as error:
            pytest.skip(f"the file system has no file of this size: {error}")
    reseal(bundle, lambda m: m["files"].update({"large.bin": {"size": SIZE, "sha256": "0" * 64}}), read=False)
    return bundle


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_it_reads(process: subprocess.Popen[str], path: Path) -> None:
    folder = Path(f"/proc/{process.pid}/fd")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for each in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(each) == str(path):
                    return
        time.sleep(0.01)
    pytest.fail(f"{path} was not read")


COMMANDS = (
    ["generate", "{}", "--max-new-tokens", "2", "--", "a"],
    ["seal", "{}"],
    ["quantize", "{}", "-o", "{}-int8", "--dtype", "int8"],
)


@pytest.mark.parametrize("arguments", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_ctrl_c_ends_a_command_that_hashes(endless: Path, arguments: list[str]) -> None:
    words = [word.format(endless) for word in arguments]
    with started(sys.executable, "-m", "ortgpt", *words) as process:
        wait_until_it_reads(process, endless / "large.bin")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert errors.splitlines()[-1] == "interrupted"
        assert "Traceback" not in errors


def test_ctrl_c_ends_a_load_and_nothing_goes_on(endless: Path) -> None:
    code = """if True:
        import sys, threading
        import ortgpt
        try:
            ortgpt.load(sys.argv[1])
        except KeyboardInterrupt:
            print("interrupted", threading.active_count())
    """
    with started(sys.executable, "-c", code, str(endless)) as process:
        wait_until_it_reads(process, endless / "large.bin")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LIMIT_S) == ("interrupted 1\n", "")
        assert process.returncode == 0


def test_a_load_in_a_daemon_does_not_hold_up_the_end_of_the_process(endless: Path) -> None:
    code = """if True:
        import sys, threading
        import ortgpt
        threading.Thread(target=ortgpt.load, args=[sys.argv[1]], daemon=True).start()
        sys.stdin.read()
    """
    command = [sys.executable, "-c", code, str(endless)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until_it_reads(process, endless / "large.bin")
        time.sleep(0.5)  # the rest of the load, which is another matter
        try:
            assert process.communicate("", timeout=LIMIT_S)[1] == ""
            assert process.returncode == 0
        finally:
            process.kill()


def test_an_error_does_not_wait_for_large_files_that_cannot_explain_it(endless: Path) -> None:
    """But for those that can: a damaged vocabulary is the better reason."""
    code = """if True:
        import sys
        import ortgpt
        for options in ({"threads": 0}, {"device": "cuda"}, {}):
            try:
                ortgpt.load(sys.argv[1], **options)
            except ortgpt.OrtGptError as error:
                print(error)
    """

    def messages() -> list[str]:
        with started(sys.executable, "-c", code, str(endless)) as process:
            return process.communicate(timeout=LIMIT_S)[0].splitlines()

    merges = (endless / "merges.txt").read_bytes()
    (endless / "merges.txt").write_bytes(b"x" * len(merges))
    damaged = messages()
    assert len(damaged) == 3
    assert damaged[0].startswith("threads = 0")
    assert "not for cuda" in damaged[1]
    assert "merges.txt does not have the sha256 of the manifest" in damaged[2]
    (endless / "merges.txt").write_bytes(b"x" * len(merges))
    size = (endless / "merges.txt").stat().st_size
    assert size == len(merges)
    digest = hashlib.sha256(b"x" * size).hexdigest()
    reseal(endless, lambda m: m["files"].update({"merges.txt": {"size": size, "sha256": digest}}), read=False)
    assert "merges.txt line" in messages()[2]


def test_opening_a_graph_can_be_cancelled(small_bundle: Path) -> None:
    plan = plan_session(open_bundle(small_bundle))
    plan.cancel()
    with pytest.raises(BundleError, match=r"(?i)cancel"):
        plan.open()
    assert plan_session(open_bundle(small_bundle)).open().handle.get_inputs()


def test_a_job_is_stopped_by_an_error_and_waited_for() -> None:
    stop, ended = threading.Event(), threading.Event()

    def job() -> None:
        stop.wait()
        ended.set()

    with pytest.raises(KeyboardInterrupt), Background(job, stop=stop.set, daemon=True):
        raise KeyboardInterrupt
    assert ended.is_set()
    with Background(lambda: 7, stop=stop.clear, daemon=True) as seven:
        assert seven.result() == 7
    assert stop.is_set()
    with Background(lambda: 1 // 0, stop=stop.clear, daemon=True) as nothing, pytest.raises(ZeroDivisionError):
        nothing.result()


def test_a_load_does_without_threads_of_its_own(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ortgpt.load(small_bundle) as generator:
        want = generator.generate("a", max_new_tokens=4).token_ids
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ortgpt.load(small_bundle, threads=1) as generator:
        assert generator.generate("a", max_new_tokens=4).token_ids == want
    monkeypatch.setattr("ortgpt.bundle.folder.sha256_of", lambda path, stop: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ortgpt.load(small_bundle, threads=1)
