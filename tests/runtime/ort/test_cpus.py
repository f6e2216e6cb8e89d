from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortgpt.ort.cpus import allowed_cpus


def make_root(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "5000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "9900000 100000\n"}, 8),
        # The quota of an outer group binds too.
        (
            {
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/app/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
            },
            3,
        ),
        # In a container the group's own path is not visible; its files are at the root.
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        # Version 1.
        (
            {
                "proc/self/cgroup": "4:memory:/app\n3:cpu,cpuacct:/app\n",
                "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "0::/app\n", "sys/fs/cgroup/app/cpu.max": "garbage\n"}, 8),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert allowed_cpus(make_root(tmp_path, files)) == cpus


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity mask")
def test_affinity_of_a_real_process() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}})\nimport ortgpt.ort.cpus as c; print(c.allowed_cpus())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_systems_without_a_mask_count_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert allowed_cpus(tmp_path) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert allowed_cpus(tmp_path) == 1
