"""The command eval: figures on stdout, as text and JSON; what is wrong on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import ortgpt
from ortgpt.cli.main import main
from ortgpt.tools.evaluate import evaluate_file

CHOICES = (
    '{"context": "It is a", "choices": ["truth", "man"], "answer": 0}\n'
    '{"context": "It is", "choices": ["a", "the"], "answer": "a"}\n'
)


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, arguments)], input=stdin)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(CHOICES)
    return path


def test_json_has_every_figure(small: ortgpt.Generator, small_bundle: Path, rows: Path) -> None:
    result = run(small_bundle, rows, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    values = json.loads(result.stdout)
    expected = evaluate_file(small, rows)
    for name in ("acc", "acc_norm"):
        metric = expected.metrics[name]
        assert values.pop(name) == metric.value
        assert values.pop(f"{name}_stderr") == metric.stderr
        assert values.pop(f"{name}_baseline") == metric.baseline == 0.5
    assert values == {"kind": "multiple-choice", "rows": 2, "tokens": expected.tokens, "cut_rows": 0}


def test_text_has_a_line_for_each_figure(small: ortgpt.Generator, small_bundle: Path, rows: Path) -> None:
    acc = evaluate_file(small, rows).metrics["acc"]
    lines = run(small_bundle, rows).stdout.splitlines()
    assert lines[0] == f"acc              {acc.value:.4f} ± {acc.stderr:.4f}  (baseline 0.5000)"
    assert [line.split()[0] for line in lines] == ["acc", "acc_norm", "rows", "tokens"]
    single = run(small_bundle, rows, "--limit", 1).stdout
    assert "±" not in single
    assert "rows             1\n" in single


def test_other_kinds_and_standard_input(small_bundle: Path, tmp_path: Path) -> None:
    line = '{"text": "It is a truth universally acknowledged, ' + "that a single man " * 12 + '"}'
    names = [each.split()[0] for each in run(small_bundle, "-", stdin=line).stdout.splitlines()]
    assert names == ["word_perplexity", "byte_perplexity", "bits_per_byte", "rows", "tokens", "words", "bytes"]
    values = json.loads(run(small_bundle, "-", "--json", stdin='{"context": "a", "target": "b"}').stdout)
    assert (values["kind"], values["acc_stderr"]) == ("completion", None)
    line = line.replace('man "', 'man"')
    lines = run(small_bundle, "-", "--kind", "last-word", stdin=line).stdout.splitlines()
    assert [each.split()[0] for each in lines] == ["acc", "perplexity", "rows", "tokens", "cut_rows"]
    assert run(small_bundle, "-", "--delimiter", "", stdin='{"context": "a ", "target": "b"}').exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "reason"),
    [
        ([], '{"text": ""}\n{"text": 1}', 1, "standard input: 2 of 2 rows are at fault\nline 1: text = ''"),
        ([], "", 1, "standard input has no rows"),
        (
            ["--delimiter", ""],
            '{"text": "a"}',
            2,
            "--delimiter = '' would have no effect on rows of the kind perplexity",
        ),
        (["--limit", "0"], '{"text": "a"}', 2, "--limit = 0 (accepted: an integer of 1 or more)"),
        (["--kind", "x"], '{"text": "a"}', 2, "'x' is not one of"),
        (["--device", "tpu"], '{"text": "a"}', 2, "--device = 'tpu'"),
    ],
)
def test_what_is_wrong_is_said(small_bundle: Path, arguments: list[str], stdin: str, code: int, reason: str) -> None:
    result = run(small_bundle, "-", *arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, "")
    assert reason in result.stderr


def test_missing_files_are_named(small_bundle: Path, rows: Path) -> None:
    assert "missing.jsonl: No such file" in run(small_bundle, "missing.jsonl").stderr
    assert run("missing", rows).exit_code == 1
