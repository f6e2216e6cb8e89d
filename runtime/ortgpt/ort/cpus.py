"""How many CPUs this process may use, by affinity mask and control group, and which instruction sets they have."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_FEATURES = (
    "avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


def allowed_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs this process may keep busy, at least 1.

    That is the number of CPUs in the affinity mask, if the system has one, but not more than the CPU quota of the
    control groups (v1 and v2), rounded up. `root` is the folder of /proc and /sys.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity mask
        cpus = os.cpu_count() or 1
    return max(1, min([cpus, *(math.ceil(quota) for quota in _cgroup_quotas(root))]))


def cpu_features(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the CPU's instruction sets that matter here, by Linux's names; empty if they are unknown."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    words = set(text.split())
    return tuple(name for name in _FEATURES if name in words)


def _cgroup_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas that bind this process, in CPUs, from its own control group up to the outermost."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
        else:
            continue
        folder = base / group.lstrip("/")
        # A container sees its own group as the root, whatever /proc calls it.
        for candidate in (folder, *folder.parents):
            yield from _quota_in(candidate)
            if candidate == base:
                break


def _quota_in(folder: Path) -> Iterator[float]:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return
    if quota not in ("max", "-1") and int(period) > 0:
        yield int(quota) / int(period)
