"""The invariants of the design: who imports whom, where the contract's strings are, and what a wheel holds."""

from __future__ import annotations

import ast
import graphlib
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

ROOT = Path(__file__).parents[1]
RUNTIME = Path(ortgpt.__file__).parent
MODELS = Path(ortgpt_models.__file__).parent
EXPORTER = Path(ortgpt_exporter.__file__).parent
HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "optimum", "safetensors", "tokenizers", "peft")

# What each room may import of this project, rooms of its own package by their names. A room is a folder, or a module at
# the top of a package. Everything may import contract, errors, results, forks and native_call.
_BASE = ("contract", "errors", "results", "forks", "native_call")
_EXPORTED = tuple(f"ortgpt.{room}" for room in (
    "contract", "errors", "bundle", "options", "text", "ort", "sampling", "engine", "decode", "model", "generator",
    "classifier", "tools",
))  # fmt: skip
ALLOWED: dict[str, tuple[str, ...]] = {
    "ortgpt.contract": (),
    "ortgpt.errors": (),
    "ortgpt.background": (),
    "ortgpt.results": (),
    "ortgpt.forks": ("errors",),
    "ortgpt.native_call": (),
    "ortgpt.bundle": _BASE,
    "ortgpt.options": _BASE,
    "ortgpt.text": (*_BASE, "bundle"),
    "ortgpt.ort": (*_BASE, "background", "bundle"),
    "ortgpt.sampling": (*_BASE, "options", "text", "ort"),
    "ortgpt.engine": (*_BASE, "bundle", "ort"),
    "ortgpt.decode": (*_BASE, "options", "sampling", "engine"),
    "ortgpt.opening": (*_BASE, "background", "bundle", "text", "ort"),
    "ortgpt.model": (*_BASE, "bundle", "options", "text", "ort", "sampling", "engine", "opening"),
    "ortgpt.continuation": (*_BASE, "options", "text", "decode"),
    "ortgpt.request": (*_BASE, "options", "sampling", "engine", "decode", "model", "continuation"),
    "ortgpt.conversation": (*_BASE, "options", "text", "model", "continuation", "request"),
    "ortgpt.embedding": (*_BASE, "options", "engine", "decode", "model"),
    "ortgpt.aio": _BASE,
    "ortgpt.task_rows": (*_BASE, "bundle"),
    "ortgpt.classifier_input": (*_BASE, "bundle", "text", "model"),
    "ortgpt.classifier": (
        *_BASE, "bundle", "options", "text", "ort", "sampling", "engine", "decode", "opening", "classifier_input",
    ),
    "ortgpt.generator": (
        *_BASE, "bundle", "options", "text", "ort", "engine", "decode", "model", "request", "conversation", "embedding",
        "aio",
    ),
    "ortgpt.loading": (*_BASE, "opening", "model", "generator"),
    "ortgpt.integrations": (*_BASE, "options", "ort", "decode", "generator", "loading"),
    "ortgpt.tasks": (*_BASE, "bundle", "options", "text", "decode", "model", "generator"),
    "ortgpt": (
        "engine", "errors", "results", "native_call", "options", "conversation", "generator", "loading", "classifier",
    ),
    "ortgpt.tools": (
        *_BASE, "bundle", "options", "ort", "engine", "decode", "generator", "loading", "task_rows", "ortgpt",
    ),
    "ortgpt.cli": (
        *_BASE, "bundle", "options", "text", "model", "request", "conversation", "generator", "loading", "classifier",
        "classifier_input", "task_rows", "tasks", "tools", "ortgpt",
    ),
    "ortgpt.__main__": ("cli",),
    "ortgpt.__pyinstaller": (),
    "ortgpt_models": (),
    "ortgpt_exporter.errors": ("ortgpt.errors",),
    "ortgpt_exporter.progress": ("ortgpt_models",),
    "ortgpt_exporter.target_folder": (*_EXPORTED, "errors", "ortgpt_models"),
    "ortgpt_exporter.texts": (*_EXPORTED, "errors", "evaluation"),
    "ortgpt_exporter.portable_files": (*_EXPORTED, "checkpoint", "ortgpt_models"),
    "ortgpt_exporter.checkpoint": (*_EXPORTED, "errors", "progress", "ortgpt_models"),
    "ortgpt_exporter.graph": (*_EXPORTED, "errors", "ortgpt_models"),
    "ortgpt_exporter.evaluation": (*_EXPORTED, "errors", "ortgpt_models"),
    "ortgpt_exporter.quantization": (*_EXPORTED, "errors", "texts", "graph"),
    "ortgpt_exporter.task_file": (
        "ortgpt.bundle", "ortgpt.classifier_input", "ortgpt.errors", "ortgpt.task_rows", "errors", "texts",
    ),
    "ortgpt_exporter.judges": (
        *_EXPORTED, "ortgpt.classifier_input", "errors", "texts", "task_file", "graph", "evaluation", "quantization",
        "ortgpt_models", "ortgpt",
    ),
    "ortgpt_exporter.quantize": (
        *_EXPORTED, "errors", "progress", "target_folder", "judges", "texts", "quantization", "ortgpt_models", "ortgpt",
    ),
    "ortgpt_exporter.sweep": (
        *_EXPORTED, "errors", "progress", "texts", "evaluation", "judges", "quantization", "quantize", "ortgpt",
        "ortgpt_models",
    ),
    "ortgpt_exporter.export": (
        *_EXPORTED, "errors", "progress", "target_folder", "portable_files", "checkpoint", "graph", "evaluation",
        "quantization", "quantize", "ortgpt_models",
    ),
    "ortgpt_exporter.adapter_settings": ("ortgpt_models",),
    "ortgpt_exporter.starting_point": (
        "ortgpt.contract", "errors", "adapter_settings", "checkpoint", "portable_files", "ortgpt_models",
    ),
    "ortgpt_exporter.loss_plot": ("ortgpt_models",),
    "ortgpt_exporter.finetune": (
        "ortgpt.bundle", "ortgpt.classifier_input", "ortgpt.contract", "ortgpt.errors", "ortgpt.task_rows",
        "checkpoint", "errors", "export", "loss_plot", "portable_files", "quantization", "task_file", "ortgpt_models",
    ),
    "ortgpt_exporter": ("errors", "checkpoint", "export", "quantize", "quantization"),
    "ortgpt_exporter.cli": (
        *_EXPORTED, "ortgpt.cli", "errors", "progress", "adapter_settings", "checkpoint", "export", "finetune",
        "quantize", "quantization", "starting_point", "sweep", "ortgpt_models",
    ),
}  # fmt: skip


def modules(folder: Path) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""
    named = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imports(path: Path) -> set[str]:
    """Return what a module imports anywhere, in functions and behind TYPE_CHECKING too, with the names it takes."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


ALL = {name: path for folder in (RUNTIME, EXPORTER, MODELS) for name, path in modules(folder).items()}


def module_of(imported: str) -> str | None:
    """Return the module of this project that an imported name is, or lies in."""
    while imported and imported not in ALL:
        imported = imported.rpartition(".")[0]
    return imported or None


def room_of(module: str) -> str:
    """Return the room of a module: models are one room, other packages have one for each folder and top module."""
    package, *rest = module.split(".")
    return package if package == "ortgpt_models" or not rest else f"{package}.{rest[0]}"


def arrows() -> Iterator[tuple[str, str]]:
    """Yield which module imports which, all of this project."""
    for name, path in ALL.items():
        for imported in imports(path):
            target = module_of(imported)
            if target is not None and target != name:
                yield name, target


def test_each_room_imports_what_the_table_allows() -> None:
    unlisted = {room_of(module) for module in ALL} - ALLOWED.keys()
    assert not unlisted
    assert not ALLOWED.keys() - {room_of(module) for module in ALL}
    wrong = []
    for module, target in arrows():
        room, other = room_of(module), room_of(target)
        own = room.partition(".")[0]
        allowed = {name if name.startswith("ortgpt") else f"{own}.{name}" for name in ALLOWED[room]}
        if other != room and other not in allowed:
            wrong.append(f"{module} imports {target}")
    assert not wrong


def test_no_module_imports_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, target in arrows():
        graph.setdefault(module, set()).add(target)
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_type_checking_hides_no_import_but_those_of_lazy_packages() -> None:
    lazy = {"ortgpt", "ortgpt.loading", "ortgpt.opening", "ortgpt_exporter", "ortgpt_exporter.cli", "ortgpt_models"}
    lazy |= {"ortgpt.generator"}  # for asyncio
    hiding = {name for name, path in ALL.items() if "TYPE_CHECKING" in path.read_text(encoding="utf-8")}
    assert hiding <= lazy


def packages(folder: Path) -> dict[str, set[str]]:
    return {name: {each.partition(".")[0] for each in imports(path)} for name, path in modules(folder).items()}


def test_the_runtime_names_no_heavy_package() -> None:
    for name, imported in packages(RUNTIME).items():
        own = {"tokenizers"} if name == "ortgpt.text.json_tokenizer" else set()  # an extra, for bundles that need it
        assert not imported & {"ortgpt_models", "ortgpt_exporter", *HEAVY} - own, name


def test_only_its_adapter_names_a_program_that_bundles_run_in() -> None:
    naming = {name for name, imported in packages(RUNTIME).items() if imported & {"lm_eval", "tqdm"}}
    assert naming == {"ortgpt.integrations.lm_eval"}


def test_the_models_name_no_onnx() -> None:
    for name, imported in packages(MODELS).items():
        assert not imported & {"ortgpt", "ortgpt_exporter", "onnx", "onnxruntime", "onnxscript", "onnx_ir"}, name


def strings(path: Path) -> Iterator[str]:
    """Yield the string constants of a module that are not docstrings, of fields neither."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def blocked(code: str, *names: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter in which the packages `names` cannot be imported."""
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in names)
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
    code = "import ortgpt, ortgpt.cli.main, sys; print([name for name in sys.argv[1:] if name in sys.modules])"
    names = (*HEAVY, "onnxruntime", "ortgpt_models", "ortgpt_exporter")
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
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
# The models know no bundle.
OF_CONTRACT = {RUNTIME: TENSORS | values(contract.Axis), EXPORTER: TENSORS | values(contract.Axis), MODELS: TENSORS}


@pytest.mark.parametrize("folder", OF_CONTRACT, ids=lambda folder: folder.name)
def test_the_contracts_strings_are_in_one_module(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        if path == RUNTIME / "contract.py":
            continue
        # An axis has the name of an option of another program.
        of_contract = TENSORS if path.is_relative_to(RUNTIME / "integrations") else OF_CONTRACT[folder]
        for text in strings(path):
            assert text not in of_contract, f"{path} has {text!r}"
            assert not text.startswith(("past_key_values", "present.")), f"{path} has {text!r}"


def test_only_the_command_lines_use_the_terminal() -> None:
    for name, path in ALL.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "print" not in called, path
        if not name.startswith(("ortgpt.cli", "ortgpt_exporter.cli")):
            assert not {each for each in imports(path) if each.partition(".")[0] == "click"}, path


def test_a_wheel_holds_the_built_in_bundles_the_forms_and_the_types(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size <= 6_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for bundle in ("austen", "selftest"):
        for path in (ROOT / "runtime/ortgpt/builtin" / bundle).iterdir():
            assert f"ortgpt/builtin/{bundle}/{path.name}" in names
    forms = {path.name for path in (ROOT / "runtime/ortgpt/tasks/forms").iterdir()}
    assert {f"ortgpt/tasks/forms/{name}" for name in forms} == {name for name in names if name.endswith(".toml")}
    assert len(forms) == 5
    assert not [name for name in names if "checkpoints" in name]
    for package in ("ortgpt", "ortgpt_exporter", "ortgpt_models"):
        assert f"{package}/py.typed" in names
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {
        "ortgpt", "ortgpt_exporter", "ortgpt_models",
    }  # fmt: skip
