"""The three invariants of the design: who imports whom, and where the contract's strings stand."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ortgpt
import ortgpt_exporter
import ortgpt_models
from ortgpt import contract

RUNTIME = Path(ortgpt.__file__).parent
MODELS = Path(ortgpt_models.__file__).parent
EXPORTER = Path(ortgpt_exporter.__file__).parent
HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "optimum", "safetensors", "tokenizers")


def imported_packages(folder: Path) -> dict[str, set[str]]:
    """Return the top-level packages that each module imports anywhere, in functions too."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        names = found[path.name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                names.add((node.module or "").partition(".")[0])
    return found


def strings(path: Path) -> Iterator[str]:
    """Yield the string constants of a module that are not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_the_runtime_names_no_other_part_and_no_heavy_package() -> None:
    modules = imported_packages(RUNTIME)
    assert len(modules) >= 15
    for name, packages in modules.items():
        assert not packages & {"ortgpt_models", "ortgpt_exporter", *HEAVY}, name


def test_the_models_name_no_other_part_and_no_onnx() -> None:
    modules = imported_packages(MODELS)
    assert len(modules) >= 6
    for name, packages in modules.items():
        assert not packages & {"ortgpt", "ortgpt_exporter", "onnx", "onnxruntime", "onnxscript", "onnx_ir"}, name


def blocked(code: str, *packages: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter in which `packages` cannot be imported."""
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in packages)
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)


def test_the_runtime_generates_where_nothing_else_can_be_imported(small_bundle: Path) -> None:
    code = (
        f"import ortgpt\nwith ortgpt.load({str(small_bundle)!r}) as generator:\n"
        "    print(len(generator.generate('It is a truth', max_new_tokens=5).token_ids))\n"
        "    print(generator.score('a truth').tokens > 0)\n"
    )
    done = blocked(code, "ortgpt_models", "ortgpt_exporter", *HEAVY)
    assert (done.stdout, done.stderr) == ("5\nTrue\n", "")


def test_importing_the_runtime_loads_no_heavy_package_and_not_even_onnxruntime() -> None:
    code = "import ortgpt, ortgpt.cli, sys; print([name for name in sys.argv[1:] if name in sys.modules])"
    packages = (*HEAVY, "onnxruntime", "ortgpt_models", "ortgpt_exporter")
    done = subprocess.run([sys.executable, "-c", code, *packages], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_models_work_where_runtime_and_exporter_cannot_be_imported() -> None:
    code = (
        "import torch, ortgpt_models, ortgpt_models.train\n"
        "gpt = ortgpt_models.GPT(ortgpt_models.GPTConfig(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=1))\n"
        "print(tuple(gpt(torch.zeros(1, 3, dtype=torch.int64)).shape))\n"
    )
    done = blocked(code, "ortgpt", "ortgpt_exporter", "onnx", "onnxruntime", "transformers")
    assert (done.stdout, done.stderr) == ("(1, 3, 9)\n", "")


def values(*groups: type) -> set[str]:
    return {value for group in groups for name, value in vars(group).items() if name.isupper()}


TENSORS = values(contract.Tensor) | {contract.File.MANIFEST, contract.File.MODEL}
# "id" is a key of tokenizer.json too, "inputs" and "outputs" of genai_config.json, "name" of ONNX Runtime's profiles;
# "sha256" and "size" are what load(verify=...) takes.
KEYS = values(contract.Key, contract.Axis) - {"id", "inputs", "outputs", "name", "sha256", "size"}
# The models know no bundle; "dtype", say, is there a key of Hugging Face's config.json.
OF_CONTRACT = {RUNTIME: TENSORS | KEYS, EXPORTER: TENSORS | KEYS, MODELS: TENSORS}


@pytest.mark.parametrize("folder", OF_CONTRACT, ids=lambda folder: folder.name)
def test_the_contracts_strings_stand_in_one_module(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        if path == RUNTIME / "contract.py":
            continue
        for text in strings(path):
            assert text not in OF_CONTRACT[folder], f"{path.name} has {text!r}"
            assert not text.startswith(("past_key_values", "present.")), f"{path.name} has {text!r}"


def test_the_contract_itself_imports_nothing() -> None:
    assert imported_packages(RUNTIME)["contract.py"] == {"__future__"}


def test_no_module_prints_but_the_command_line() -> None:
    for folder in (RUNTIME, MODELS, EXPORTER):
        for path in folder.rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            called = {
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert "print" not in called, path
            if not path.name.startswith("cli"):
                assert "click" not in imported_packages(path.parent)[path.name], path


def test_a_wheel_holds_the_bundled_model_and_the_types(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("config.json", "model.safetensors", "vocab.json", "merges.txt", "README.md", "training.json"):
        assert f"ortgpt_models/checkpoints/austen/{name}" in names
    for path in (root / "runtime/ortgpt/selftest").iterdir():
        assert f"ortgpt/selftest/{path.name}" in names
    for package in ("ortgpt", "ortgpt_exporter", "ortgpt_models"):
        assert f"{package}/py.typed" in names
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {
        "ortgpt", "ortgpt_exporter", "ortgpt_models",
    }  # fmt: skip
