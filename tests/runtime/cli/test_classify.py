"""The command classify: answers in order, for arguments, files and pipes; a line that fails has its error in place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ortgpt
from classifiers import Exported, oracle, write_classifier
from ortgpt.cli.main import main
from ortgpt_exporter import export_bundle

TEXTS = ["It is a truth", "a", "Café 日本"]


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["classify", *map(str, arguments)], input=stdin)


@pytest.fixture(scope="module")
def expected(text_classifier: Exported) -> list[ortgpt.Classification]:
    with ortgpt.load_classifier(text_classifier.bundle) as classifier:
        return classifier.classify(TEXTS)


def lines_of(results: list[ortgpt.Classification]) -> list[str]:
    return [f"{each.label}  {each.probabilities[str(each.label)]:.4f}" for each in results]


def test_texts_of_the_command_line(text_classifier: Exported, expected: list[ortgpt.Classification]) -> None:
    result = run(text_classifier.bundle, *TEXTS)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == lines_of(expected)


@pytest.mark.parametrize("how", ["pipe", "--input -", "file.txt", "file.jsonl"])
def test_texts_of_files_and_pipes(
    text_classifier: Exported, expected: list[ortgpt.Classification], tmp_path: Path, how: str
) -> None:
    plain = "\ufeff" + "\r\n\n".join(TEXTS)
    stdin = {"pipe": plain, "--input -": "\n".join(map(json.dumps, TEXTS))}.get(how)
    arguments: list[object] = [] if how == "pipe" else ["--input", "-" if how == "--input -" else tmp_path / how]
    if how == "file.txt":
        (tmp_path / how).write_text(plain, encoding="utf-8", newline="")
    elif how == "file.jsonl":
        values = [TEXTS[0], {"text": TEXTS[1]}, {"prompt": TEXTS[2], "id": 7}]
        (tmp_path / how).write_text("\n".join(map(json.dumps, values)))
    result = run(text_classifier.bundle, *arguments, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == lines_of(expected)


def test_json_has_all_of_an_answer(text_classifier: Exported, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "It is", "id": 7}\n\n[5, 9]\n')
    result = run(text_classifier.bundle, "--json", "--input", tmp_path / "in.jsonl")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(each["line"], each["text"], each.get("id")) for each in records] == [(1, "It is", 7), (3, [5, 9], None)]
    with ortgpt.load_classifier(text_classifier.bundle) as classifier:
        for record, answer in zip(records, classifier.classify(["It is", [5, 9]]), strict=True):
            assert record["probabilities"] == answer.probabilities
            assert (record["label"], record["labels"]) == (answer.label, answer.labels)
            assert np.array_equal(np.array(record["logits"], np.float32), answer.logits)
    (argument,) = map(json.loads, run(text_classifier.bundle, "--json", "It is").stdout.splitlines())
    assert argument == {key: each for key, each in records[0].items() if key not in ("line", "id")}


def test_a_line_that_fails_has_its_error_in_its_place(text_classifier: Exported, tmp_path: Path) -> None:
    bad: list[Any] = [
        {"x": 1},
        [],
        {"text": 5},
        {"text": "a", "prompt": "b"},
        {"text": "a", "labels": 1},
        [300],
        [1] * 65,
    ]
    lines = [json.dumps(each) for each in ["It is", *bad]] + ["{", '"a"']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    result = run(text_classifier.bundle, "--json", "--input", tmp_path / "in.jsonl")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert "8 of 10 texts failed" in result.stderr
    assert [each["line"] for each in records] == [*range(1, 11)]
    assert ["error" in each for each in records] == [False, *[True] * 8, False]
    assert records[1]["x"] == 1
    assert records[7]["error"]["type"] == "ContextLengthError"
    plain = run(text_classifier.bundle, "--input", tmp_path / "in.jsonl").stdout.splitlines()
    assert plain[0] == lines_of([classified(text_classifier, "It is")])[0]
    assert all(line.startswith(f"error  line {number}: ") for number, line in enumerate(plain[1:9], 2))
    assert plain[9] == lines_of([classified(text_classifier, "a")])[0]


def classified(exported: Exported, text: str) -> ortgpt.Classification:
    with ortgpt.load_classifier(exported.bundle) as classifier:
        return classifier.classify([text])[0]


def test_a_label_of_a_line_comes_back_under_another_name(text_classifier: Exported, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "It is", "label": "good"}\n{"text": "a", "label": 1, "expected": 2}\n')
    result = run(text_classifier.bundle, "--json", "--input", tmp_path / "in.jsonl")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["expected"], first["label"]) == ("good", classified(text_classifier, "It is").label)
    assert '"expected" is a name that the record itself has' in second["error"]["message"]


def test_a_single_bad_line_has_its_error_in_its_place(text_classifier: Exported, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n{\n")
    result = run(text_classifier.bundle, "--json", "--input", tmp_path / "in.jsonl")
    (record,) = map(json.loads, result.stdout.splitlines())
    assert (result.exit_code, record["line"], record["error"]["type"]) == (1, 2, "PromptError")
    assert record["error"]["message"].startswith("not JSON: ")


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_file_without_a_text_is_an_error(text_classifier: Exported, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n \n")
    result = run(text_classifier.bundle, "--input", tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--input {tmp_path / name} holds no text" in result.stderr


def test_messages_name_the_argument_or_the_line(text_classifier: Exported, tmp_path: Path) -> None:
    long = "a" * 200
    assert run(text_classifier.bundle, "a", long).stdout.splitlines()[1].startswith("error  TEXT 2 has ")
    assert run(text_classifier.bundle, "").stdout == "error  TEXT is empty (accepted: at least one token)\n"
    (tmp_path / "in.txt").write_text(f"a\n{long}\n")
    second = run(text_classifier.bundle, "--input", tmp_path / "in.txt").stdout.splitlines()[1]
    assert second.startswith("error  line 2: the text has ")


def test_a_pair_for_a_classifier_of_texts_is_an_answer_of_its_own(text_classifier: Exported) -> None:
    result = run(text_classifier.bundle, "--pair", "a", "b", "--pair", "c", "d")
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines)) == (1, 2)
    assert lines[1].startswith("error  --pair 2 is a pair, and what gets a label is a single text")


def test_more_lines_than_are_computed_at_once_stay_in_order(text_classifier: Exported, tmp_path: Path) -> None:
    texts = ["a" * (1 + 7 * index % 50) for index in range(150)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    with ortgpt.load_classifier(text_classifier.bundle) as classifier:
        answers = lines_of(classifier.classify(texts))
    assert run(text_classifier.bundle, "--input", tmp_path / "in.txt").stdout.splitlines() == answers


def test_tokens_have_a_line_each(token_classifier: Exported) -> None:
    result = run(token_classifier.bundle, "It is", "é")
    with ortgpt.load_classifier(token_classifier.bundle) as classifier:
        first, second = classifier.classify(["It is", "é"])
    lines = result.stdout.splitlines()
    assert len(lines) == len(first.tokens) + len(second.tokens) + 2
    assert [line.split()[-2] for line in lines[: len(first.tokens)]] == [token.label for token in first.tokens]
    assert lines[len(first.tokens)] == lines[-1] == ""
    (record,) = map(json.loads, run(token_classifier.bundle, "--json", "It is").stdout.splitlines())
    assert [token["token_id"] for token in record["tokens"]] == [token.token_id for token in first.tokens]
    assert (record["tokens"][0]["start"], record["tokens"][-1]["end"]) == (0, 5)


def test_several_labels_and_values(tmp_path: Path) -> None:
    for kind, config in (("multi", {"problem_type": "multi_label_classification"}), ("value", {"num_labels": 1})):
        model = write_classifier(tmp_path / kind, **config)
        bundle = export_bundle(tmp_path / kind, tmp_path / f"{kind}.bundle").path
        with ortgpt.load_classifier(bundle) as classifier:
            rows = [classifier.tokenizer.encode(text) for text in TEXTS]
        lines = run(bundle, *TEXTS).stdout.splitlines()
        for line, logits in zip(lines, oracle(model, rows), strict=True):
            if kind == "value":
                assert float(line) == pytest.approx(logits[0], abs=1e-3)
            else:
                held = [f"LABEL_{index}" for index, logit in enumerate(logits) if logit >= 0]
                assert line.split()[::2] == (held or ["none"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["text", "--input", "x.txt"], "TEXT cannot be combined with --input"),
        (["text", "--pair", "a", "b"], "TEXT cannot be combined with --pair"),
        (["text", "--input-format", "text"], "--input-format needs --input"),
        (["--input", "missing.txt"], "missing.txt: No such file"),
        (["text", "--device", "tpu"], "--device = 'tpu'"),
        (["text", "--verify", "none"], "'none' is not one of"),
        ([], "no text (accepted: TEXT, --pair, --input FILE, or texts on standard input"),
    ],
)
def test_wrong_usage_is_one_line(text_classifier: Exported, arguments: list[str], reason: str) -> None:
    result = run(text_classifier.bundle, *arguments, stdin="")
    assert result.exit_code in (1, 2)
    assert reason in result.stderr
    assert result.stdout == ""


def test_other_commands_name_this_one(text_classifier: Exported, small_bundle: Path, tmp_path: Path) -> None:
    for arguments in (["generate", "a"], ["score", str(tmp_path / "t")], ["bench"], ["chat"]):
        (tmp_path / "t").write_text("a")
        command, *rest = arguments
        result = CliRunner().invoke(main, [command, str(text_classifier.bundle), *rest], input="")
        assert result.exit_code == 1, result.output
        assert "or use `ortgpt classify`" in result.stderr
    assert "or use `ortgpt generate`" in run(small_bundle, "a").stderr
    sealed = CliRunner().invoke(main, ["seal", str(text_classifier.bundle)])
    assert "has no generation_config.json" in sealed.stderr


def test_info_says_the_labels(text_classifier: Exported) -> None:
    text = CliRunner().invoke(main, ["info", str(text_classifier.bundle)]).stdout
    _, task, labels, *_ = (line.split(maxsplit=1) for line in text.splitlines())
    assert task == ["task", "text-classification, single label classification"]
    assert labels == ["labels", "3 (bad, fair, good)"]
    values = json.loads(CliRunner().invoke(main, ["info", "--json", str(text_classifier.bundle)]).stdout)
    assert [*values][:4] == ["path", "task", "labels", "problem_type"]
    assert (values["task"], values["labels"]) == ("text-classification", ["bad", "fair", "good"])


def test_a_pipe_works(text_classifier: Exported, expected: list[ortgpt.Classification]) -> None:
    command = [sys.executable, "-m", "ortgpt", "classify", str(text_classifier.bundle)]
    done = subprocess.run(command, input="\n".join(TEXTS).encode(), capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == lines_of(expected)
