"""Import ONNX Runtime, or say what is wrong with the packages that bring it; word how to install what is missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from ortgpt.background import Background
from ortgpt.errors import DeviceError
from ortgpt.native_call import native_call

_WHEELS = ("onnxruntime", "onnxruntime-gpu")
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def install_hint(*extras: str) -> str:
    """Return the command that installs these extras of this copy of ortgpt, as the end of a message.

    The project's name is not registered on a package index, so the command names the folder or wheel that this copy was
    installed from, or, if that is unknown, the packages themselves. On Linux, pip takes the CUDA build of torch unless
    told otherwise, so a command that needs torch installs its CPU build first. A frozen app installs nothing.
    """
    if getattr(sys, "frozen", False):
        return f"build this app again where the extra [{','.join(extras)}] of ortgpt is installed"
    steps = []
    if {"cpu", "cuda"} & {*extras} and _is_there("onnxruntime"):
        steps.append("`pip uninstall -y onnxruntime onnxruntime-gpu`")
    if {"export", "optimum", "lora"} & {*extras} and sys.platform == "linux" and not _is_there("torch"):
        steps.append(f"`pip install torch --index-url {_TORCH_INDEX}`")
    return f"run {', then '.join([*steps, _pip_install(extras)])}"


def _pip_install(extras: tuple[str, ...]) -> str:
    origin, requirements = _origin(), _requirements(extras)
    if origin is not None:
        return f"`pip install '{origin}[{','.join(extras)}]'`"
    if requirements:
        return f"`pip install {' '.join(requirements)}`"
    return f"`pip install` with the extra [{','.join(extras)}] of the folder or wheel that you have"


def _origin() -> str | None:
    """Return the folder or wheel that this package was installed from (PEP 610); None if it is unknown or gone."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        text = distribution("ortgpt").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text)["url"] if text else "")
    path = url2pathname(url.path)
    return path if url.scheme == "file" and Path(path).exists() else None


def _requirements(extras: tuple[str, ...]) -> list[str]:
    """Return the requirements of these extras, quoted for a shell."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("ortgpt") or []
    except PackageNotFoundError:
        lines = []
    split = [line.partition(";") for line in lines]
    names = [name.strip() for name, _, marker in split if any(f"extra == '{each}'" in marker for each in extras)]
    return [f"'{name}'" for name in names]


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def import_onnxruntime(minimum: str) -> ModuleType:
    """Import onnxruntime. Raises DeviceError if it is missing, damaged, older than `minimum` or installed twice."""
    installed = installed_wheels()
    if len(installed) > 1:
        raise DeviceError(
            f"onnxruntime and onnxruntime-gpu are both installed and overwrite each other; {_either_hint()}"
        )
    _check_proc(installed)
    try:
        # Ctrl-C, which only the main thread hears, would break the import, and some of its code then hides the reason.
        with Background(_import_module, stop=lambda: None, daemon=False) as importing:
            onnxruntime = importing.result()
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise DeviceError(f"ONNX Runtime cannot be imported ({error}); {_either_hint()}") from error
        raise DeviceError(f"ONNX Runtime is not installed; {_either_hint()}") from None
    except Exception as error:  # it loads shared libraries, which fails in many ways
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C, as a library's code passes it on
            raise KeyboardInterrupt from error
        raise DeviceError(f"ONNX Runtime cannot be imported ({error}); {_either_hint()}") from error
    if not hasattr(onnxruntime, "InferenceSession"):  # the remains of a package import as an empty namespace
        raise DeviceError(
            f"ONNX Runtime is incomplete, as after the uninstall of one of its two packages; {_either_hint()}"
        )
    if _version(onnxruntime.__version__) < _version(minimum):
        raise DeviceError(
            f"onnxruntime {minimum} or newer is needed, {onnxruntime.__version__} is installed; "
            f"run `pip install -U {installed[0] if installed else 'onnxruntime'}`"
        )
    _disable_telemetry(onnxruntime)
    return onnxruntime


def _import_module() -> ModuleType:
    with native_call:
        import onnxruntime
    module: ModuleType = onnxruntime
    return module


def _check_proc(installed: list[str]) -> None:
    """Raise DeviceError where the import would end the process, as that of versions before 1.26 does."""
    if sys.platform != "linux" or Path("/proc/cpuinfo").exists() or not installed:
        return
    from importlib.metadata import version

    found = version(installed[0])
    if _version(found) < (1, 26):
        raise DeviceError(
            f"{installed[0]} {found} needs /proc/cpuinfo, which is not there; mount /proc (`mount -t proc proc /proc`; "
            "ProcSubset=all in a unit of systemd), or install version 1.26 or newer"
        )


def comes_from_onnxruntime(error: Exception) -> bool:
    """Tell whether ONNX Runtime raised an error: a dozen kinds without a common base, or pybind's own.

    Another one comes from elsewhere, from a signal's handler for example.
    """
    kind = type(error)
    return kind.__module__.partition(".")[0] == "onnxruntime" or kind in (RuntimeError, ValueError, TypeError)


@functools.cache  # once in a process: a caller may turn it on again
def _disable_telemetry(onnxruntime: ModuleType) -> None:
    """Turn off telemetry on Windows, unless the user's variable says otherwise; elsewhere a call comes too late."""
    # The values that ONNX Runtime 1.32 takes for a yes; `import ortgpt` sets "1" where the user has set none.
    if os.environ.get("ORT_DISABLE_TELEMETRY", "").strip().lower() in ("1", "true", "yes", "on"):
        onnxruntime.disable_telemetry_events()


def _either_hint() -> str:
    if getattr(sys, "frozen", False):
        return install_hint("cpu")
    return f"{install_hint('cpu')}, or for an NVIDIA GPU {_pip_install(('cuda',))}"


@functools.cache
def installed_wheels() -> list[str]:
    """Return the distributions that have put their files where onnxruntime would be imported from."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return []
    # importlib.metadata would take longer to import than the rest of this package.
    folder = Path(spec.origin).parents[1]
    return [wheel for wheel in _WHEELS if any(folder.glob(f"{wheel.replace('-', '_')}-*.dist-info"))]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
