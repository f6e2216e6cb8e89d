"""What other systems lack or do otherwise: commands run as on Windows, encodings, and imports that only POSIX has."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ortgpt
from support import TEXT
from windows_like import POSIX_MODULES

WINDOWS_LIKE = Path(__file__).parent / "windows_like.py"
ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("runtime", "exporter", "models") for path in (ROOT / folder).rglob("*.py"))
# A code page of Windows, and a C locale that Python does not turn into UTF-8.
CODE_PAGE = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252:strict"}
SHAPE = "--n-layer 1 --n-head 2 --n-embd 32 --n-positions 16 --vocab-size 300 --steps 4 --save-every 2 --warmup-steps 1"


def as_on_windows(*command: str | Path, text: str = "") -> str:
    words = [sys.executable, str(WINDOWS_LIKE), *map(str, command)]
    done = subprocess.run(words, env=os.environ | CODE_PAGE, input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="takes from Linux what Windows lacks")
def test_export_quantize_train_and_seal_work_as_on_windows(small_checkpoint: Path, tmp_path: Path) -> None:
    recipe = ["--block-size", "16", "--max-perplexity-ratio", "2"]
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 4, encoding="utf-8")
    bundle, quantised, trained = tmp_path / "bundle", tmp_path / "int8", tmp_path / "trained"
    as_on_windows("export", small_checkpoint, "-o", bundle)
    as_on_windows("quantize", bundle, "-o", quantised, "--dtype", "int4", *recipe)
    as_on_windows("export", small_checkpoint, "-o", bundle, "--force", "--dtype", "int8", *recipe)
    as_on_windows("train", text, "-o", trained, *SHAPE.split())
    (bundle / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    as_on_windows("seal", bundle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "int8", "text.txt", "trained"]
    written = as_on_windows("generate", bundle, "-", "--greedy", "--max-new-tokens", "8", text="It is “a”")
    with ortgpt.load(bundle) as generator:
        assert written == generator.generate("It is “a”", do_sample=False, max_new_tokens=8).text + "\n"
    for path in (bundle / "ortgpt.json", bundle / "config.json", trained / "training.json"):
        assert b"\r" not in path.read_bytes()
        json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "command", ["export", "quantize", "train", "generate", "chat", "score", "bench", "doctor", "seal", "info"]
)
def test_help_can_be_written_in_a_code_page(command: str) -> None:
    words = [sys.executable, "-m", "ortgpt", command, "--help"]
    done = subprocess.run(words, env=os.environ | CODE_PAGE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def is_text_without_encoding(name: str, call: ast.Call) -> bool:
    """Tell whether a call opens a text, by the names and modes that this project uses, and names no encoding."""
    keywords = {keyword.arg for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    if name in ("run", "Popen", "check_output"):
        return bool({"text", "universal_newlines"} & keywords)
    method = isinstance(call.func, ast.Attribute)
    if name in ("read_text", "write_text"):
        return method and not (name == "read_text" and call.args)  # a distribution's names a file
    mode = ast.unparse(call.args[0 if method else 1]) if len(call.args) > (0 if method else 1) else "'r'"
    return name == "open" and ast.unparse(call.func) != "os.open" and "b" not in mode


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("path.read_text()", True), ("path.write_text(x)", True), ("open(x)", True), ("path.open('x')", True),
        ("subprocess.run(x, text=True)", True), ("open(x, 'rb')", False), ("path.open('r+b')", False),
        ("path.read_text(encoding='utf-8')", False), ("os.open(x, 0)", False), ("write_text('x')", False),
    ],
)  # fmt: skip
def test_the_rule_for_encodings_finds_what_it_should(source: str, expected: bool) -> None:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    assert is_text_without_encoding(ast.unparse(call.func).rpartition(".")[2], call) == expected


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_text_that_is_opened_names_its_encoding(path: Path) -> None:
    """Windows takes a code page where a program names none."""
    assert [call.lineno for name, call in calls(path) if is_text_without_encoding(name, call)] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_modules_of_posix_are_imported_where_their_absence_is_caught(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        inner
        for node in ast.walk(tree)
        if (isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each) for each in node.handlers))
        or (isinstance(node, ast.With) and "ImportError" in ast.unparse(node.items[0]))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {*POSIX_MODULES} & {*names} or node in guarded, f"line {node.lineno}"  # type: ignore[attr-defined]
