"""The command task: answers in order, for arguments, files and pipes; a line that fails has its error in place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ortgpt
from ortgpt.cli.main import main
from ortgpt.tasks import TaskResult, form_names, form_text, run_task

TEXTS = ["She was a", "He is not", "It is a truth"]
OWN = """\
description = "d"
prompt = "{context}\\nQ: {question}\\nA:"
[options]
max_new_tokens = 4
[answer]
kind = "line"
"""


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["task", *map(str, arguments)], input=stdin)


@pytest.fixture(scope="module")
def austen() -> Iterator[ortgpt.Generator]:
    with ortgpt.load("austen") as generator:
        yield generator


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path / "own.toml"


def label_line(result: TaskResult) -> str:
    return f"{result.answer}  {result.probabilities[result.answer]:.4f}"


def test_the_answer_is_what_python_gives(austen: ortgpt.Generator) -> None:
    for name, text, options in (
        ("translate", "I have a dog.", {}),
        ("cloze", "He had always intended to visit him, though he should not", {}),
        ("summarize", "Emma is rich.", {"seed": 3, "max_new_tokens": 9}),
    ):
        flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", value)]
        result = run("austen", name, text, *flags)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == run_task(austen, name, text, **options).answer + "\n"  # type: ignore[arg-type]
    labels = run("austen", "classify", TEXTS[0])
    assert labels.stdout == label_line(run_task(austen, "classify", TEXTS[0])) + "\n"


@pytest.mark.parametrize("how", ["pipe", "-", "--input -", "file.txt", "file.jsonl"])
def test_texts_of_files_and_pipes(austen: ortgpt.Generator, tmp_path: Path, how: str) -> None:
    texts = TEXTS[:1] if how in ("pipe", "-") else TEXTS
    stdin = {"pipe": "\ufeffShe was a\n", "-": "She was a\r\n", "--input -": "\n".join(map(json.dumps, texts))}.get(how)
    arguments: list[object] = [*{"-": ["-"], "--input -": ["--input", "-"]}.get(how, [])]
    if how.startswith("file"):
        arguments = ["--input", tmp_path / how]
        lines = (
            texts if how == "file.txt" else [json.dumps(texts[0]), *(json.dumps({"text": each}) for each in texts[1:])]
        )
        (tmp_path / how).write_text("\n\n".join(lines), encoding="utf-8")
    result = run("austen", "classify", *arguments, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [label_line(run_task(austen, "classify", each)) for each in texts]


def test_json_has_all_of_an_answer(austen: ortgpt.Generator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "She was a", "id": 7, "label": "negative"}\n\n"He is not"\n')
    result = run("austen", "classify", "--json", "--input", tmp_path / "in.jsonl")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    for record, line, text in zip(records, (1, 3), TEXTS[:2], strict=True):
        expected = run_task(austen, "classify", text)
        assert (record["line"], record["text"], record["answer"]) == (line, text, expected.answer)
        assert record["prompt"] == f"{text} very"
        assert record["probabilities"] == expected.probabilities
        assert [each["logprob"] for each in record["choices"]] == [each.logprob for each in expected.choices]
    assert (records[0]["id"], records[0]["label"]) == (7, "negative")
    assert "completion" not in records[0]
    (word,) = map(json.loads, run("austen", "cloze", "--json", "it is a truth").stdout.splitlines())
    found = run_task(austen, "cloze", "it is a truth")
    assert word == {
        "text": "it is a truth", "prompt": "it is a truth", "answer": found.answer, "logprob": found.logprob,
        "is_likeliest": True,
    }  # fmt: skip
    (answer,) = map(json.loads, run("austen", "qa", "--json", "Who?").stdout.splitlines())
    assert set(answer) == {"question", "prompt", "answer", "completion"}
    assert answer["completion"]["token_ids"]


def test_forms_with_several_fields(austen: ortgpt.Generator, own: Path, tmp_path: Path) -> None:
    expected = run_task(austen, own, {"context": "Emma = rich.", "question": "Who?"}).answer + "\n"
    for arguments in (
        ["--set", "context=Emma = rich.", "Who?"],
        ["--set", "question=Who?", "Emma = rich."],
        ["--set", "question=Who?", "--set", "context=Emma = rich."],
    ):
        result = run("austen", own, *arguments)
        assert (result.exit_code, result.stdout) == (0, expected)
    rows: list[Any] = [{"context": "Emma = rich.", "question": "Who?"}, "Who?", {"question": "Who?"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = run("austen", own, "--set", "context=Emma = rich.", "--input", tmp_path / "in.jsonl")
    assert result.stdout.splitlines() == [expected.rstrip("\n")] * 3
    (tmp_path / "in.jsonl").write_text(json.dumps(rows[0]))
    result = run("austen", own, "--set", "context=Other.", "--json", "--input", tmp_path / "in.jsonl")
    assert json.loads(result.stdout)["context"] == "Emma = rich."  # a line's own wins


def test_a_line_that_fails_has_its_error_in_its_place(austen: ortgpt.Generator, tmp_path: Path) -> None:
    bad: list[Any] = [{"x": 1}, [5], {"text": 5}, {"text": "a", "answer": "b", "expected": "c"}, "a truth " * 300]
    lines = [json.dumps(each) for each in ["She was a", *bad]] + ["{", '"He is not"']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    result = run("austen", "classify", "--json", "--input", tmp_path / "in.jsonl")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert "6 of 8 inputs failed" in result.stderr
    assert [each["line"] for each in records] == [*range(1, 9)]
    assert ["error" in each for each in records] == [False, *[True] * 6, False]
    assert records[1]["x"] == 1
    messages = [each["error"]["message"] for each in records[1:7]]
    for message, reason in zip(
        messages,
        (
            "the field text is missing", "[5] (accepted: an object with text, or a text)",
            "text = 5 (accepted: a text)", '"expected" is a name that the record itself has; rename it',
            "exceed the context of 256", "not JSON: ",
        ),
        strict=True,
    ):  # fmt: skip
        assert reason in message
    plain = run("austen", "classify", "--input", tmp_path / "in.jsonl").stdout.splitlines()
    assert plain[0] == label_line(run_task(austen, "classify", "She was a"))
    assert [line.startswith(f"error  line {number}: ") for number, line in enumerate(plain, 1)][1:7] == [True] * 6


def test_an_answer_in_a_row_comes_back_as_expected(austen: ortgpt.Generator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "She was a", "answer": "positive", "id": 7}\n')
    (record,) = map(
        json.loads, run("austen", "classify", "--json", "--input", tmp_path / "in.jsonl").stdout.splitlines()
    )
    expected = run_task(austen, "classify", "She was a")
    assert (record["id"], record["expected"], record["answer"]) == (7, "positive", expected.answer)


def test_a_file_without_inputs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n \n")
    result = run("austen", "classify", "--input", tmp_path / "in.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no inputs (accepted: one in each line)" in result.stderr


def test_more_lines_than_are_computed_at_once_stay_in_order(austen: ortgpt.Generator, tmp_path: Path) -> None:
    texts = [f"{'a' * (1 + 7 * index % 20)} {index}" for index in range(70)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    result = run("austen", "qa", "--max-new-tokens", 2, "--json", "--input", tmp_path / "in.txt")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["question"] for each in records] == texts
    for index in (0, 31, 32, 69):
        assert records[index]["answer"] == run_task(austen, "qa", texts[index], max_new_tokens=2).answer


def test_an_answer_of_several_lines_stays_one_line_of_a_file(tmp_path: Path) -> None:
    form = OWN.replace('kind = "line"', 'kind = "text"').replace("{context}\\nQ: {question}\\nA:", "{text}")
    (tmp_path / "own.toml").write_text(form.replace("max_new_tokens = 4", "max_new_tokens = 20\nbad_words = ' '"))
    (tmp_path / "in.txt").write_text("CHAPTER I\nCHAPTER II\n")
    result = run("austen", tmp_path / "own.toml", "--input", tmp_path / "in.txt")
    assert len(result.stdout.splitlines()) == 2
    assert "\\n" in result.stdout


def test_list_and_show_need_no_bundle(tmp_path: Path) -> None:
    listed = run("--list")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [*form_names()]
    for name in form_names():
        shown = run("--show", name)
        assert (shown.exit_code, shown.stdout) == (0, form_text(name))
    (tmp_path / "mine.toml").write_text(run("--show", "classify").stdout.replace(" very", " so"))
    record = json.loads(run("austen", tmp_path / "mine.toml", "--json", "She was").stdout)
    assert record["prompt"] == "She was so"
    refused = run("--show", "nothing")
    assert refused.exit_code == 2
    assert "there is no form 'nothing' (accepted: classify, cloze, qa, summarize, translate)" in refused.output


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["austen", "sumarize", "a"], 1, "there is no form 'sumarize' (accepted: classify, "),
        (["austen", "qa", "a", "--input", "x.txt"], 2, "TEXT cannot be combined with --input"),
        (["austen", "qa", "a", "--input-format", "text"], 2, "--input-format needs --input"),
        (["austen", "qa", "--input", "missing.txt"], 1, "missing.txt: No such file"),
        (["austen", "qa"], 2, "no text (accepted: TEXT, --set question=TEXT, --input FILE, or standard input)"),
        (["austen", "qa", "a", "--set", "question=b"], 2, "TEXT would have no effect: --set gives all fields"),
        (["austen", "qa", "--set", "text=b"], 2,
         "--set 'text=b' (accepted: FIELD=TEXT, where qa has the fields question)"),
        (["austen", "qa", "--set", "question"], 2, "--set 'question' (accepted: FIELD=TEXT"),
        (["austen", "qa", "--set", "question=a", "--set", "question=b"], 2, "--set question is given twice"),
        (["austen", "qa", "a", "--top-k", "-1"], 2, "--top-k = -1 (accepted: an integer of 0 or more)"),
        (["austen", "cloze", "a", "--top-k", "2"], 2,
         "--top-k = 2 would have no effect: a last word is searched, and nothing is generated (accepted: "
         "--max-new-tokens, --context-overflow, --keep-tokens)"),
        (["austen", "qa", "a", "--greedy", "--seed", "1"], 2, "--seed = 1 would have no effect with --greedy"),
        (["austen", "qa", "a", "--device", "tpu"], 2, "--device = 'tpu'"),
        (["austen", "qa", "a", "--verify", "none"], 2, "'none' is not one of"),
        (["nothing", "qa", "a"], 1, "nothing does not exist"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], code: int, reason: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


def test_a_form_with_two_fields_left_says_how_to_give_them(own: Path) -> None:
    result = run("austen", own, "a")
    assert result.exit_code == 2
    assert "has the fields context, question; give all but one of them by --set FIELD=TEXT, or all" in result.stderr


def test_a_classifiers_bundle_names_its_command(text_classifier: Any) -> None:
    result = run(text_classifier.bundle, "qa", "a")
    assert result.exit_code == 1
    assert "use `ortgpt classify`" in result.stderr


def test_nothing_is_read_of_tomls_reader_until_a_form_is() -> None:
    code = "import ortgpt, ortgpt.cli.main, sys; print('tomllib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
