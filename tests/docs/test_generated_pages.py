"""Pages that come from the code are what the code says, and the check of that notices a difference."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)


def test_generated_pages_are_what_the_code_says() -> None:
    done = run(DOCS / "write_generated.py")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("page", "now", "then"),
    [
        ("cli.md", "--top-k", "--top-kay"),
        ("options.md", "`temperature`", "`temperatur`"),
        ("bundle-format.md", "`masked_tokens`", "`masked`"),
    ],
)
def test_a_page_that_differs_is_named_in_one_line(tmp_path: Path, page: str, now: str, then: str) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs)
    text = (docs / page).read_text(encoding="utf-8")
    assert now in text
    (docs / page).write_text(text.replace(now, then), encoding="utf-8")
    done = run(docs / "write_generated.py")
    assert done.returncode == 1
    assert done.stderr == f"{page}: not what the code says; run python docs/write_generated.py\n"
    assert then in (docs / page).read_text(encoding="utf-8")  # a check writes nothing
