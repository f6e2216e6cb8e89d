"""The command where parts of the system are missing, as in a chroot, a bare container or a unit of systemd."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortgpt.ort.package import import_onnxruntime

# Mounts what an argument names, then runs the rest.
_MOUNT = 'eval "$1" && shift && exec "$@"'
_PATH = os.pathsep.join(sys.path)


@functools.cache
def why_no_namespaces() -> str | None:
    if shutil.which("unshare") is None:
        return "there is no `unshare` here"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs none /proc"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces can be made here: {done.stderr.strip()}" if done.returncode else None


def ortgpt(mount: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in namespaces of its own after a shell command that changes what is mounted."""
    reason = why_no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", mount]
    return subprocess.run(
        [*command, sys.executable, "-m", "ortgpt", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": _PATH, "ORT_DISABLE_TELEMETRY": "1"} | environment,
    )


def generate(mount: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ortgpt(
        mount, "generate", "austen", "--max-new-tokens", "4", "--temperature", "0", "--", "It is", **environment
    )


@pytest.fixture(scope="module")
def answer() -> str:
    done = generate("true")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mount", ["mount -t tmpfs none /proc", "mount --bind /proc/self/ns /proc"])
def test_without_proc_the_message_names_it(mount: str, answer: str) -> None:
    """ONNX Runtime 1.26 works; older ones end the process at the import, newer ones open no weights."""
    done = generate(mount)
    if done.returncode == 0:
        assert done.stdout == answer
        assert import_onnxruntime("1.26")
        return
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert "/proc" in last
    assert "mount -t proc proc /proc" in last
    assert "not intact" not in last
    doctor = ortgpt(mount, "doctor")
    assert doctor.returncode == 1
    assert "mount -t proc proc /proc" in doctor.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "mount",
    [
        "mount -t tmpfs none /sys",
        "mount -t tmpfs none /dev",
        "mount -t tmpfs none /tmp",
        "mount -t tmpfs none /dev/shm",
        "mount --bind /dev/null /proc/cpuinfo",
        "mount --bind /dev/null /proc/self/cgroup || true",
        "mount --bind /dev/null /etc/passwd",
        "mount -o remount,bind,ro / && ! touch /x 2> /dev/null",
    ],
)
def test_what_else_may_be_missing(mount: str, answer: str) -> None:
    done = generate(mount)
    assert (done.returncode, done.stdout) == (0, answer), done.stderr


def test_there_may_be_no_home(answer: str, tmp_path: Path) -> None:
    assert generate("true", HOME=str(tmp_path / "none"), TMPDIR=str(tmp_path / "none")).stdout == answer
