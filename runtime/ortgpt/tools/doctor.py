"""What this machine and environment offer, and whether a small built-in model gives the right tokens here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ortgpt
from ortgpt.contract import MINIMUM_ONNXRUNTIME
from ortgpt.errors import OrtGptError
from ortgpt.ort.cpus import allowed_cpus, cpu_features
from ortgpt.ort.integer_probe import multiplies_exactly
from ortgpt.ort.package import import_onnxruntime, installed_wheels

SELF_TEST = Path(__file__).parents[1] / "builtin" / "selftest"  # a bundle of one layer with a vocabulary of bytes
SELF_TEST_PROMPT = "ortgpt"
SELF_TEST_IDS = (92, 173, 161, 161, 164, 170, 31, 6)
_PACKAGES = ("numpy", "tiktoken", "click", "llguidance", "tokenizers")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `ortgpt doctor` found. None means unknown."""

    ortgpt: str
    python: str
    platform: str
    packages: dict[str, str | None]
    wheels: list[str]
    """The installed packages that bring ONNX Runtime; there should be one."""
    onnxruntime: str | None
    providers: list[str]
    cpu: str
    cpu_features: list[str]
    cpus: int
    """The CPUs of the machine."""
    cpus_allowed: int
    """The CPUs that affinity mask and quota leave to this process."""
    memory_bytes: int | None
    memory_available_bytes: int | None
    exact_byte_products: bool | None
    """Whether 8-bit products are exact at full speed on this CPU."""
    self_test_s: float | None
    """The seconds that the self-test took; None if it did not pass."""
    faults: list[str]
    """What is wrong, and how to mend it."""


def diagnose() -> Diagnosis:
    """Look at Python, packages, ONNX Runtime, CPUs and memory, and run the self-test. Raises nothing itself."""
    faults: list[str] = []
    version, providers, exact, seconds = None, [], None, None
    try:
        onnxruntime = import_onnxruntime(MINIMUM_ONNXRUNTIME)
        version, providers = onnxruntime.__version__, list(onnxruntime.get_available_providers())
        exact = multiplies_exactly(onnxruntime)
        seconds = _self_test()
    except OrtGptError as error:
        faults.append(str(error))
    memory = _memory()
    return Diagnosis(
        ortgpt=ortgpt.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in _PACKAGES},
        wheels=list(installed_wheels()),
        onnxruntime=version,
        providers=providers,
        cpu=_cpu_name(),
        cpu_features=list(cpu_features()),
        cpus=os.cpu_count() or 1,
        cpus_allowed=allowed_cpus(),
        memory_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        exact_byte_products=exact,
        self_test_s=seconds,
        faults=faults,
    )


def _self_test() -> float:
    """Load the self-test's bundle and generate with it; return the seconds it took. Raises OrtGptError if it fails."""
    started = time.perf_counter()
    with ortgpt.load(SELF_TEST, device="cpu") as generator:
        alone = generator.generate(SELF_TEST_PROMPT, max_new_tokens=len(SELF_TEST_IDS)).token_ids
        rows = generator.generate_batch([SELF_TEST_PROMPT, "a"], max_new_tokens=len(SELF_TEST_IDS))
    for how, ids in (("alone", alone), ("in a batch", rows[0].token_ids)):
        if tuple(ids) != SELF_TEST_IDS:
            raise OrtGptError(
                f"the self-test gave the tokens {ids} {how}, not {list(SELF_TEST_IDS)}: ONNX Runtime computes wrong "
                "results here; install another version of it"
            )
    return time.perf_counter() - started


def _memory() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty if the system has no such file."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _cpu_name() -> str:
    return next(_model_names(), platform.processor() or platform.machine())


def _model_names() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
