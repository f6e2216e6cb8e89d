"""The examples that need nothing but the runtime, run here; `make check-examples` runs all of them.

How each is run, and what it must write, is in checks/examples.py: this uses the same functions, with this Python.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


def load_checks() -> Any:
    spec = importlib.util.spec_from_file_location("check_examples", ROOT / "checks" / "examples.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


CHECKS = load_checks()


def place(name: str, tmp_path: Path) -> Any:
    return CHECKS.Place(CHECKS.copy_example(name, tmp_path / name), Path(sys.executable))


def test_the_terminal_streams_the_text_of_generate_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    CHECKS.terminal(place("terminal", tmp_path))


def test_the_cells_of_the_notebook_give_what_the_runtime_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = place("notebook", tmp_path)
    monkeypatch.chdir(here.folder)
    notebook = json.loads((here.folder / "tour.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as written:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            cell["outputs"] = [{"text": written.getvalue()}]
    CHECKS.check_cells(here, notebook)


def test_the_command_of_the_image_writes_what_the_runtime_gives(tmp_path: Path) -> None:
    here = place("docker", tmp_path)
    text = (here.folder / "Dockerfile").read_text(encoding="utf-8")
    command = [
        word for part in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE) for word in json.loads(part)
    ]
    (want,) = here.expected(CHECKS.image_call(command))
    assert here.run(here.python, "-m", *command) == f"{want}\n"


def test_the_app_writes_what_the_runtime_gives(tmp_path: Path) -> None:
    here = place("pyinstaller_app", tmp_path)
    CHECKS.check_app(here, [here.python, here.folder / "app.py"])


def test_a_client_that_leaves_is_found_out_if_the_generation_goes_on(tmp_path: Path) -> None:
    """The check itself must be able to fail: count the steps of a program that nobody ends."""
    here = place("terminal", tmp_path)
    with here.beginning(here.python, "stream.py", "It is", "2000", STEP_SECONDS="0.1") as (_, output):
        output.read(8)
        with pytest.raises(CHECKS.ExampleError, match="goes on"):
            here.expect_leaving_ends(here.steps(), 2, "nobody left")


def test_every_example_has_a_check_and_a_line_in_the_list() -> None:
    assert sorted(CHECKS.CHECKS) == NAMES
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\]\((\w+)/\)", text))) == NAMES


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.parent.name)
def test_every_program_compiles_and_says_what_it_is(path: Path) -> None:
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert code.co_consts[0].endswith((".", ".\n"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("requirements.txt")), ids=lambda path: path.parent.name)
def test_requirements_are_pinned_and_leave_the_runtime_to_the_user(path: Path) -> None:
    wanted = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert wanted
    for line in wanted:
        assert re.fullmatch(r"[a-z-]+==[0-9.]+", line), line
        assert not line.startswith("ortgpt"), "not on PyPI: the name is free to be taken by anyone"


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook" / "tour.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
