"""What a process imports, and when: a graph opens while the modules are imported that it does not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ortgpt

CODE = """if True:
    import sys
    import ortgpt
    from ortgpt import opening

    class Spy(opening.Background):
        def __enter__(self):
            print([name for name in ("numpy", "onnxruntime", "tiktoken", "ortgpt.generator") if name in sys.modules])
            return super().__enter__()

    opening.Background = Spy
    print(ortgpt.load(sys.argv[1]).generate("It is a truth", max_new_tokens=5).token_ids)
    """


def test_hashing_begins_before_numpy_is_imported_and_opening_before_the_generator(small_bundle: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(small_bundle)], capture_output=True, text=True, check=True)
    hashing, opening, ids = done.stdout.splitlines()
    assert hashing == "[]"
    assert opening == "['numpy', 'onnxruntime']"
    with ortgpt.load(small_bundle) as generator:
        assert ids == str(generator.generate("It is a truth", max_new_tokens=5).token_ids)


def test_the_names_of_the_package_are_those_that_tools_find_in_its_file() -> None:
    """Type checkers and PyInstaller read the imports that are never executed."""
    tree = ast.parse(Path(ortgpt.__file__).read_text(encoding="utf-8"))
    block = next(each for each in tree.body if isinstance(each, ast.If) and isinstance(each.test, ast.Name))
    imports = [each for each in block.body if isinstance(each, ast.ImportFrom)]
    module_of = {each.names[0].name: str(each.module) for each in imports}
    assert [each.names[0].asname for each in imports] == [*module_of]
    assert module_of.keys() == {*ortgpt.__all__}
    for name, module in module_of.items():
        assert getattr(ortgpt, name) is getattr(sys.modules[module], name)
    assert {*ortgpt.__all__, "__version__"} <= {*dir(ortgpt)}


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'ortgpt' has no attribute 'lod'"):
        ortgpt.lod  # type: ignore[attr-defined]  # noqa: B018
