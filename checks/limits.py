"""Run the runtime where a control group lets a process have few threads: it works with fewer, or says so in one line.

    python checks/limits.py [BUNDLE]

It makes a control group with the controller `pids` (version 1 or 2). If it cannot, it prints the reason and stops.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))  # version 1, version 2
_LIMIT_S = 120
_ENTER = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.executable, sys.argv[2:])"
_CALLS = """
import asyncio, sys
import ortgpt
try:
    with ortgpt.load(sys.argv[1], threads=None if sys.argv[2] == "all" else int(sys.argv[2])) as generator:
        first = generator.generate("It is a truth", max_new_tokens=6).token_ids
        assert generator.generate_batch(["It is a truth"] * 3, max_new_tokens=6)[2].token_ids == first
        assert len(generator.generate("It is", max_new_tokens=6, grammar="[a-z ]+").token_ids) == 6
        assert generator.score("a single man").tokens > 2
        print(first)
        try:
            assert asyncio.run(generator.agenerate("It is a truth", max_new_tokens=6)).token_ids == first
        except ortgpt.EngineError as error:
            print(error)
except ortgpt.OrtGptError as error:
    sys.exit(str(error))
"""


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """Make a control group that limits the number of threads. Raises OSError with the reason if it cannot."""
    root = next((root for root in _ROOTS if root.is_dir()), None)
    if root is None:
        raise OSError("no control groups are mounted at /sys/fs/cgroup")
    group = root / f"ortgpt-limits-{os.getpid()}"
    group.mkdir()
    try:
        if not (group / "pids.max").exists():
            raise OSError(f"{root} has no controller for the number of threads (pids)")
        yield group
    finally:
        group.rmdir()


def run(group: Path, limit: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command in the group with at most `limit` threads. Raises TimeoutExpired where it hangs."""
    (group / "pids.max").write_text(str(limit), encoding="utf-8")
    # numpy's OpenBLAS starts a thread for each CPU at its import, and raises KeyboardInterrupt where it cannot.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", _ENTER, str(group / "cgroup.procs"), sys.executable, *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment,
    )  # fmt: skip


def main(bundle: str) -> None:
    """Try each limit with each number of threads; exit with 1 at the first that hangs or answers otherwise."""
    try:
        with control_group() as group:
            want = run(group, 64, "-c", _CALLS, bundle, "1").stdout
            assert want.startswith("["), want
            for limit in (1, 2, 3, 4, 5, 6, 8, 12):
                for threads in ("1", "2", "4", "8", "all"):
                    _check(run(group, limit, "-c", _CALLS, bundle, threads), want, f"pids.max {limit}, {threads}")
                    flags = [] if threads == "all" else ["--threads", threads]
                    command = ["-m", "ortgpt", "generate", bundle, "It is", "--max-new-tokens", "2", *flags]
                    _check(run(group, limit, *command), "", f"pids.max {limit}, {threads}, the command")
    except OSError as error:
        print(f"not run: no control group can be made here ({error})")


def _check(done: subprocess.CompletedProcess[str], want: str, name: str) -> None:
    errors = done.stderr.splitlines()
    is_told = len(errors) == 1 and "threads" in errors[0] and "Traceback" not in done.stderr
    is_right = done.returncode == 0 and done.stdout.startswith(want.partition("\n")[0]) and (not errors or is_told)
    if not is_right and not (done.returncode in (1, 2) and is_told):
        sys.exit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{name}: {errors[0] if errors else 'right'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "austen")
