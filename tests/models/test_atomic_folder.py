from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from ortgpt_models import atomic_folder
from ortgpt_models.atomic_folder import write_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with write_folder(out) as folder:
        (folder / "file").write_text("x")
        assert not out.exists()
    assert (out / "file").read_text() == "x"
    assert names(out.parent) == ["out"]


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are those of POSIX")
def test_permissions_are_those_of_plain_files(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        with write_folder(tmp_path / "out") as folder:
            (folder / "file").touch()
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(BaseException), write_folder(tmp_path / "out") as folder:  # noqa: B017, PT011, PT012
        (folder / "file").write_text("x")
        raise error
    assert names(tmp_path) == []


def test_an_existing_folder_is_kept_unless_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(FileExistsError, match="already exists"), write_folder(out):
        pass
    with pytest.raises(RuntimeError), write_folder(out, replace=True):
        raise RuntimeError
    assert names(out) == ["old"]
    with write_folder(out, replace=True) as folder:
        (folder / "new").touch()
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    monkeypatch.setattr("ortgpt_models.atomic_folder._exchange", lambda *_: False)  # as on other systems than Linux
    rename = Path.rename
    for failing in ("out", ".partial"):

        def fail(self: Path, target: Path, failing: str = failing) -> Path:
            if self.name.endswith(failing):
                raise OSError("no")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="no"), write_folder(out, replace=True) as folder:
            (folder / "new").touch()
        assert names(tmp_path) == ["out"]
        assert names(out) == ["old"]


def test_a_file_or_a_link_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError, match="not a folder"), write_folder(tmp_path / name, replace=True):
            pass
    assert names(tmp_path) == ["file", "link"]


def test_a_replaced_folder_is_never_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = threading.Event()
    missing = []

    def watch() -> None:
        while not done.is_set():
            missing.extend([] if os.path.isdir(out) else ["missing"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(100):
        with write_folder(out, replace=True) as folder:
            (folder / "new").touch()
    done.set()
    watcher.join()
    assert missing == []


def test_a_folder_may_be_written_inside_one_that_is_being_written(tmp_path: Path) -> None:
    with write_folder(tmp_path / "out") as folder:
        with write_folder(folder / "inner") as inner:
            (inner / "file").touch()
        (folder / "inner" / "file").rename(folder / "file")
        (folder / "inner").rmdir()
    assert names(tmp_path / "out") == ["file"]


def test_many_writers_at_once_take_nothing_from_each_other(tmp_path: Path) -> None:
    def write(number: int) -> str:
        with write_folder(tmp_path / "out", replace=True) as folder:
            (folder / "file").write_text(str(number))
        return (folder.parent / "out" / "file").read_text()

    write(-1)
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(write, range(200))} <= {*map(str, range(-1, 200))}
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_of_many_writers_of_a_new_folder_one_wins_and_the_others_say_so(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:  # as on other systems than Linux
        monkeypatch.setattr("ortgpt_models.atomic_folder._exchange", lambda *_: False)
    together = threading.Barrier(8)

    def write(number: int, *, replace: bool) -> str:
        try:
            with write_folder(tmp_path / "out", replace=replace) as folder:
                (folder / "file").write_text(str(number))
                together.wait(30)
        except FileExistsError as error:
            return str(error)
        return "wrote"

    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            said = [*pool.map(lambda number: write(number, replace=False), range(8))]
            assert said.count("wrote") == 1
            assert said.count(f"{tmp_path / 'out'} already exists; nothing was written: choose another name or remove "
                              "it first") == 7  # fmt: skip
            assert {*pool.map(lambda number: write(number, replace=True), range(8))} == {"wrote"}
            assert names(tmp_path) == ["out"]
            assert names(tmp_path / "out") == ["file"]
            shutil.rmtree(tmp_path / "out")


@pytest.mark.skipif(sys.platform != "linux", reason="names the folders that reach the disk by /proc")
@pytest.mark.parametrize("exists", [False, True])
def test_files_and_folders_reach_the_disk_and_their_names_after_the_rename(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    if exists:
        out.mkdir(parents=True)
    synced: list[tuple[str, bool]] = []

    def sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (out / "file").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    with write_folder(out, replace=True) as folder:
        (folder / "file").write_text("x")
    created = [] if exists else [(str(tmp_path), False)]
    before, after = [(str(folder / "file"), False), (str(folder), False)], [(str(out.parent), True)]
    assert synced == [*created, *before, *after]


def test_a_file_system_that_syncs_no_folders_is_no_error_and_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    for number, name in ((errno.EINVAL, "one"), (errno.EIO, "two")):

        def sync(descriptor: int, number: int = number) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", sync)
        expected = pytest.raises(OSError, match="Input/output") if name == "two" else contextlib.nullcontext()
        with expected, write_folder(tmp_path / name) as folder:
            (folder / "file").write_text("x")
    assert names(tmp_path) == ["one"]


def test_windows_is_told_why_a_folder_in_use_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    monkeypatch.setattr(atomic_folder, "os", SimpleNamespace(**vars(os) | {"name": "nt"}))
    monkeypatch.setattr(atomic_folder, "_exchange", lambda *_: False)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self == out:
            raise PermissionError(13, "Access is denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    refused = pytest.raises(PermissionError, match="has one of its files open; close the programs")
    with refused as caught, write_folder(out, replace=True) as folder:
        (folder / "new").touch()
    assert caught.value.filename == str(out)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["old"]


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_what_a_killed_writer_left_goes_and_what_a_live_one_writes_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = """if True:
        import os, signal, sys
        from pathlib import Path
        from ortgpt_models.atomic_folder import write_folder
        with write_folder(Path(sys.argv[1])) as folder:
            (folder / "file").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)"""
    assert subprocess.run([sys.executable, "-c", killed, str(out)], check=False).returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".out.")
    others = [".out.mine.partial", ".out.0123abcd.partial", ".out2.0123abcd.partial"]
    for name in others[::2]:
        (tmp_path / name).mkdir()  # somebody's, and another writer's
    (tmp_path / others[1]).touch()  # no folder at all
    with write_folder(out) as folder:
        (folder / "file").write_text("first")
        with write_folder(out) as second:
            (second / "file").write_text("second")
        (out / "file").rename(tmp_path / "taken")
        out.rmdir()
    assert (out / "file").read_text() == "first"
    assert names(tmp_path) == sorted([*others, "out", "taken"])


def test_a_folder_may_hold_folders(tmp_path: Path) -> None:
    with write_folder(tmp_path / "out") as folder:
        (folder / "inner" / "deep").mkdir(parents=True)
        (folder / "inner" / "deep" / "file").write_text("text")
    assert (tmp_path / "out" / "inner" / "deep" / "file").read_text() == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
