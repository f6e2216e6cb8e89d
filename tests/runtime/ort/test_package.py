"""What is wrong with the packages that bring ONNX Runtime is said, with the commands that mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import onnxruntime
import pytest

from ortgpt import DeviceError
from ortgpt.ort.package import import_onnxruntime, install_hint, installed_wheels


def test_both_wheels_installed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxruntime-1.30.0.dist-info", "onnxruntime_gpu-1.30.0.dist-info"):
        (tmp_path / name).mkdir()
    spec = importlib.util.spec_from_file_location("onnxruntime", tmp_path / "onnxruntime" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr("ortgpt.ort.package.installed_wheels", installed_wheels.__wrapped__)
    with pytest.raises(DeviceError, match=r"both installed.*pip uninstall.*pip install '[^']*\[cpu\]'"):
        import_onnxruntime("1.23.0")


def test_an_old_or_missing_onnxruntime_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.22.9")
    with pytest.raises(
        DeviceError, match=r"onnxruntime 1\.23\.0 or newer is needed, 1\.22\.9 is installed.*pip install -U"
    ):
        import_onnxruntime("1.23.0")
    monkeypatch.setattr(onnxruntime, "__version__", "1.100.0")
    assert import_onnxruntime("1.23.0") is onnxruntime
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=r"is not installed.*pip install '[^']*\[cpu\]'"):
        import_onnxruntime("1.23.0")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is incomplete"),  # the remains of a package without its __init__ are a namespace
        ("", "is incomplete"),
        ("raise OSError('libcudart.so.12: no such file')", r"cannot be imported \(libcudart"),
        ("raise ImportError('DLL load failed')", r"cannot be imported \(DLL load failed"),
        ("import not_there", r"cannot be imported \(No module named 'not_there'\)"),
        ("raise SystemError('initialization failed')", r"cannot be imported \(initialization"),
    ],
)
def test_a_damaged_onnxruntime_is_an_error(
    content: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "onnxruntime"
    package.mkdir()
    if content is not None:
        (package / "__init__.py").write_text(content)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    with pytest.raises(DeviceError, match=f"{reason}.*pip uninstall -y onnxruntime onnxruntime-gpu"):
        import_onnxruntime("1.23.0")


def test_ctrl_c_while_it_is_imported_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('initialization failed') from KeyboardInterrupt()")
    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        import_onnxruntime("1.23.0")


class Installed:
    """A distribution as importlib.metadata has it, with the origin that pip recorded."""

    requires = ("numpy<3,>=1.26", "matplotlib<4,>=3.9; extra == 'plot'", "matplotlib; extra == 'dev'")

    def __init__(self, url: str | None) -> None:
        self._url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._url is None else json.dumps({"url": self._url})


def test_a_hint_names_the_folder_or_wheel_of_this_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "ortgpt 1.whl"
    wheel.touch()
    for url, command in (
        (tmp_path.as_uri(), f"run `pip install '{tmp_path}[plot]'`"),
        (wheel.as_uri(), f"run `pip install '{wheel}[plot]'`"),
        ((tmp_path / "gone.whl").as_uri(), "run `pip install 'matplotlib<4,>=3.9'`"),  # which may be anybody's by now
        ("https://example.org/ortgpt.whl", "run `pip install 'matplotlib<4,>=3.9'`"),
        (None, "run `pip install 'matplotlib<4,>=3.9'`"),
    ):
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, url=url: Installed(url))
        assert install_hint("plot") == command


def test_a_hint_brings_torchs_cpu_build_on_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(tmp_path.as_uri()))
    index = "`pip install torch --index-url https://download.pytorch.org/whl/cpu`"
    install = f"`pip install '{tmp_path}[export]'`"
    monkeypatch.setattr(sys, "platform", "linux")
    assert install_hint("export") == f"run {install}"  # torch is here
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install_hint("export") == f"run {index}, then {install}"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert install_hint("export") == f"run {install}"
