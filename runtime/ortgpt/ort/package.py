"""Import ONNX Runtime, or say what is wrong with the packages that bring it. Opens nothing."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from ortgpt.errors import DeviceError

_WHEELS = ("onnxruntime", "onnxruntime-gpu")


def install_hint(target: str) -> str:
    """Return the commands that bring the ONNX Runtime of one target, and no other beside it."""
    return f"run `pip uninstall -y onnxruntime onnxruntime-gpu`, then `pip install 'ortgpt[{target}]'`"


def import_onnxruntime(minimum: str) -> ModuleType:
    """Import onnxruntime. Raises DeviceError when it is missing, damaged, older than `minimum` or installed twice."""
    installed = installed_wheels()
    anew = f"{install_hint('cpu')}, or `pip install 'ortgpt[cuda]'` for an NVIDIA GPU"
    if len(installed) > 1:
        raise DeviceError(f"onnxruntime and onnxruntime-gpu are both installed and overwrite each other; {anew}")
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise DeviceError(f"ONNX Runtime cannot be imported ({error}); {anew}") from error
        raise DeviceError(
            "ONNX Runtime is not installed; run `pip install 'ortgpt[cpu]'`, or `pip install 'ortgpt[cuda]'` for an "
            "NVIDIA GPU"
        ) from None
    except Exception as error:  # its libraries are loaded, which fails in many ways
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C, as a library's code passes it on
            raise KeyboardInterrupt from error
        raise DeviceError(f"ONNX Runtime cannot be imported ({error}); {anew}") from error
    if not hasattr(onnxruntime, "InferenceSession"):  # what is left of a package becomes a namespace
        raise DeviceError(f"ONNX Runtime is not whole, as where one of its two packages was uninstalled; {anew}")
    if _version(onnxruntime.__version__) < _version(minimum):
        raise DeviceError(
            f"onnxruntime {minimum} or newer is needed, {onnxruntime.__version__} is installed; "
            f"run `pip install -U {installed[0] if installed else 'onnxruntime'}`"
        )
    onnxruntime.disable_telemetry_events()  # on Windows; elsewhere this comes too late (see __init__)
    module: ModuleType = onnxruntime
    return module


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
