"""The examples of the pages run as they stand, and write what the pages show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ortgpt.ort.cpus import cpu_features

DOCS = Path(__file__).parents[2] / "docs"
# The model of the examples is quantised, so its last digits, and rarely a token, differ between kinds of CPUs.
SAME_KIND_OF_CPU = "avx512_vnni" in cpu_features()


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    script = DOCS / "run_code_blocks.py"
    return subprocess.run([sys.executable, script, *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "page", ["index.md", "quickstart.md", "prompt-files.md", "tasks.md", "python.md", "../README.md"]
)
def test_the_examples_of_a_page_run_and_write_what_it_shows(page: str) -> None:
    if page == "python.md":
        pytest.importorskip("llguidance", reason="the page has grammars")
    # README shows what a command writes, and not what its Python writes.
    shows_all = SAME_KIND_OF_CPU and not page.endswith("README.md")
    done = run(DOCS / page, *([] if shows_all else ["--run-only"]))
    assert (done.returncode, done.stderr) == (0, "")


PAGE = """# A page

```python
x = 6 * 7
```

```python
print(x)
```

```text
42
```

```console
$ echo one; echo two
one
two
```

```sh
exit 3
```
"""


def test_blocks_share_a_namespace_and_commands_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    done = run(page)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("now", "then", "line", "actual"),
    [
        ("\n42\n", "\n43\n", 12, "42"),
        ("\ntwo\n", "\nthree\n", 18, "two"),
        ("\n```text\n42\n```\n", "", 11, "```text"),
        ("print(x)", "pass", 11, "```console"),
    ],
)
def test_a_shown_output_that_differs_is_named_and_can_be_written(
    tmp_path: Path, now: str, then: str, line: int, actual: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace(now, then), encoding="utf-8")
    done = run(page)
    assert done.returncode == 1
    assert done.stderr.startswith(f"page.md:{line}: the output differs; it is now {actual!r}")
    assert run(page, "--run-only").returncode == 0
    assert run(page, "--write").returncode == 0
    assert run(page).returncode == 0


@pytest.mark.parametrize("then", ["raise SystemError('no')", "1 +"])
def test_an_example_that_does_not_run_is_an_error(tmp_path: Path, then: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("print(x)", then), encoding="utf-8")
    done = run(page, "--run-only")
    assert done.returncode == 1
    assert f'{page}", line 8' in done.stderr


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("echo one;", "false &&"), encoding="utf-8")
    done = run(page, "--run-only")
    assert done.returncode == 1
    assert "false && echo two: exit code 1" in done.stderr


def written_by(page: Path) -> list[str]:
    """Return what the commands and the Python of a page write, in order."""
    blocks = re.findall(r"^```(?:sh|console|py|python)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    code = "\n".join(blocks)
    written = re.findall(r"^(?:\$ )?ortgpt .* (?:-o|--out|--output) (\S+)", code, re.MULTILINE)
    return written + re.findall(r'(?:export|quantize)_bundle\([^,]+, "([^"]+)"', code)


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_no_command_of_a_page_writes_over_what_another_wrote(page: Path) -> None:
    """Followed from top to bottom, a page does not end in "already exists"."""
    written = written_by(page)
    assert len(written) == len(set(written)), written
    assert len(written) >= {"README.md": 2, "export.md": 2, "quantize.md": 5, "quickstart.md": 2}.get(page.name, 0)
