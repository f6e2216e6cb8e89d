"""The rows that are made from a novel: each by its rule, and what one gets without a model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from ortgpt.tools.evaluation_rows import read_rows

SCRIPT = Path(__file__).parents[2] / "docs" / "evaluation_rows.py"
LONG = "and so it went on for a long while " * 5


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluation_rows", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_a_novel(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paragraphs = [
        f"One {LONG}one.\nTwo began! They went\nhome. Four is not read.",
        "Too short. For all. Three.",
        f"Five {LONG}five. Six is here? He left it to me. Eight.",
        f"Nine {LONG}nine. Only two sentences.",
        f"Ten {LONG}ten. Eleven came. She was at home. Twelve.",
    ]
    (tmp_path / "novel.txt").write_text("CHAPTER 1\n\n" + "\n\n".join(paragraphs))
    script.main(str(tmp_path / "novel.txt"), str(tmp_path / "rows"))
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "rows").iterdir()
    }
    assert [row["text"].split()[-3:] for row in rows["last-word"]] == [["They", "went", "home"], ["was", "at", "home"]]
    first, second, third = rows["choice"]
    assert first["context"].endswith("one. Two began!")
    assert (first["choices"], first["answer"]) == (["They went home.", "He left it to me."], 0)
    assert (second["choices"], second["answer"]) == (["She was at home.", "He left it to me."], 1)
    assert (third["choices"], third["answer"]) == (["She was at home.", "They went home."], 0)
    assert len(rows["perplexity"]) == 4
    assert "\n" not in rows["perplexity"][0]["text"]
    for name, kind in (("last-word", "last-word"), ("choice", None), ("perplexity", None)):
        read = read_rows((tmp_path / "rows" / f"{name}.jsonl").read_text(), name, kind=kind)
        assert len(read.rows) == len(rows[name])
    report = capsys.readouterr().out.splitlines()
    assert report[0] == "last-word: 2 rows; 'home' is right in 100.00%"
    assert report[1] == "choice: 3 rows; the shorter sentence is right in 33.33%"
    assert report[2].startswith("perplexity: 4 rows; xz takes ")
