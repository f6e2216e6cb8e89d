"""An app that PyInstaller made: what its hook packs, and what a frozen program says or leaves out.

`make check-examples` builds one for real, and runs it where nothing else is.
"""

from __future__ import annotations

import ast
import importlib.metadata
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ortgpt
from ortgpt.bundle.folder import BUILT_IN, open_bundle
from ortgpt.cli.main import main
from ortgpt.loading import load
from ortgpt.ort.package import install_hint
from ortgpt.tasks.form import FORMS
from ortgpt.tools import bench
from ortgpt.tools.doctor import diagnose

PACKAGE = Path(ortgpt.__file__).parent
ROOT = Path(__file__).parents[2]


def hook_folder() -> Path:
    """Return the folder that the entry point in pyproject.toml names."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["entry-points"]["pyinstaller40"]["hook-dirs"].partition(":")
    (folder,) = getattr(__import__(module, fromlist=[function]), function)()
    return Path(folder)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the hook with functions in the place of PyInstaller's that say what they were asked for."""
    asked = types.ModuleType("PyInstaller.utils.hooks")

    def copy_metadata(name: str) -> list[str]:
        if name == "onnxruntime-gpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return [f"metadata of {name}"]

    vars(asked)["copy_metadata"] = copy_metadata
    vars(asked)["collect_data_files"] = lambda package, subdir: [f"data of {package}/{subdir}"]
    for name in ("PyInstaller", "PyInstaller.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, asked.__name__, asked)
    return runpy.run_path(str(hook_folder() / "hook-ortgpt.py"))


def test_the_hook_packs_the_bundles_the_forms_and_what_the_runtime_asks_of_distributions(hook: dict[str, Any]) -> None:
    assert BUILT_IN.relative_to(PACKAGE) == Path("builtin")
    assert FORMS.relative_to(PACKAGE) == Path("tasks/forms")
    assert {"data of ortgpt/builtin", "data of ortgpt/tasks/forms"} <= {*hook["datas"]}
    for name in ("ortgpt", *diagnose().packages, *diagnose().wheels):
        assert f"metadata of {name}" in hook["datas"], name


def test_each_data_file_of_the_runtime_is_one_that_the_hook_packs() -> None:
    others = [
        path for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".typed")
        and not path.is_relative_to(BUILT_IN) and path.parent != FORMS
    ]  # fmt: skip
    assert others == []


def test_the_hook_is_the_only_part_that_knows_pyinstaller() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, (ast.Import, ast.ImportFrom))}  # fmt: skip
        assert path.name == "hook-ortgpt.py" or not [name for name in names if "PyInstaller" in name]


def test_a_frozen_app_is_told_to_be_built_again_not_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install" in install_hint("grammar")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert install_hint("grammar") == "build this app again where the extra [grammar] of ortgpt is installed"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ortgpt.DeviceError, match=r"not installed; build this app again where .*\[cpu\].* installed$"):
        ortgpt.load("austen")


def test_a_bench_starts_no_second_process_of_a_frozen_app(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(small_bundle)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with load(small_bundle) as generator:
        assert bench._start(bundle, generator.engine.session) == (None, None)


def test_a_command_whose_package_was_left_out_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("left", "not_there.cli:left", "ortgpt.commands")
    here = importlib.metadata.EntryPoint("kept", "ortgpt.cli.text:chat", "ortgpt.commands")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point, here])
    listed = CliRunner().invoke(main, ["--help"])
    assert listed.exit_code == 0
    assert " kept " in listed.output
    assert " left " not in listed.output
    refused = CliRunner().invoke(main, ["left"])
    assert refused.exit_code == 2
    assert "No such command 'left'" in refused.output
