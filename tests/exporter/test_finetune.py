"""Fine-tuning from end to end: `transformers` opens the checkpoint, and its logits are those of the bundle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ortgpt
import tokenizer_kinds
from classifiers import write_classifier
from ortgpt.cli.main import main
from ortgpt_exporter.cli import finetune
from support import write_checkpoint

WORDS = ["truth", "man", "fortune", "wife", "daughter", "family", "mind", "Café"]


def run(*arguments: object) -> Result:
    quick = ["--epochs", "1", "--batch-size", "8", "--learning-rate", "1e-3"]
    group = type(main)("ortgpt", commands={"finetune": finetune})  # turns errors into one line
    return CliRunner().invoke(group, ["finetune", *map(str, arguments), *quick])


def rows_of(task: str, count: int = 40) -> list[dict[str, Any]]:
    draw, made = random.Random(0), list[dict[str, Any]]()
    for number in range(count):
        first, second = (" ".join(draw.choices(WORDS, k=draw.randint(1, 5))) for _ in range(2))
        if task == "classification":
            made.append({"text": f"{first} {number}", "label": ["bad", "good"][number % 2]})
        elif task == "entailment":
            made.append({"premise": f"{first} {number}", "hypothesis": second, "label": number % 3, "id": number})
        elif task == "similarity":
            made.append({"text": f"{first} {number}", "text_pair": second, "label": number / 40})
        else:
            choices = [second, "one", "two"][: 2 + number % 2]
            answer = number % 2 if number % 4 else choices[0]
            made.append({"context": f"{first} {number}", "choices": choices, "answer": answer})
    return made


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@torch.no_grad()
def theirs(folder: Path, texts: list[Any]) -> npt.NDArray[np.float32]:
    """Return the logits of `transformers` of texts or pairs, in one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    columns = [*zip(*texts, strict=True)] if isinstance(texts[0], tuple) else [texts]
    inputs = tokenizer(*map(list, columns), padding=True, return_tensors="pt")
    logits: npt.NDArray[np.float32] = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.numpy()
    return logits


FAMILIES = {
    "classification": "gpt2", "entailment": "openai-gpt", "similarity": "gpt2", "multiple-choice": "openai-gpt",
}  # fmt: skip


@pytest.mark.parametrize(("task", "family"), FAMILIES.items())
def test_a_task_from_end_to_end(tmp_path: Path, task: str, family: str) -> None:
    write_checkpoint(tmp_path / "model", family=family, **({"vocab_size": 310} if task == "similarity" else {}))
    rows, held_out = rows_of(task), rows_of(task, 50)[40:]
    data, measured = write_rows(tmp_path / "data.jsonl", rows), write_rows(tmp_path / "measured.jsonl", held_out)
    out = tmp_path / "out"
    result = run(task, data, "--from", tmp_path / "model", "-o", out, "--held-out", measured)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["bundle", "checkpoint", "losses.json", "training.json"]
    record, losses = (json.loads((out / name).read_text()) for name in ("training.json", "losses.json"))
    assert [each["step"] for each in losses["training"]] == [1, 2, 3, 4, 5]
    assert [each["step"] for each in losses["held_out"]] == [5]
    assert (record["training_rows"], record["held_out_rows"], record["task"]) == (40, 10, task)
    config = json.loads((out / "checkpoint" / "config.json").read_text())
    assert config["vocab_size"] == {"classification": 301, "entailment": 303, "similarity": 310}.get(task, 303)
    with ortgpt.load_classifier(out / "bundle") as classifier:
        assert classifier.finetuning_task == task
        assert classifier.bundle.manifest.tokenizer.kind == "byte-level-bpe"
        metric = check(classifier, out / "checkpoint", held_out, task)
        if task in ("classification", "entailment"):  # names of special tokens in a text are plain text
            names = "a <|extract|> <|endoftext|>" if task == "classification" else ("a <|extract|>", "b")
            (found,) = classifier.classify([names])
            np.testing.assert_allclose(found.logits, theirs(out / "checkpoint", [names])[0], rtol=1e-4, atol=1e-4)
    name = "held_out_mean_abs_error" if task == "similarity" else "held_out_accuracy"
    assert record[name] == pytest.approx(metric, abs=1e-4)
    assert "on 10 held-out rows" in result.stderr


def check(classifier: ortgpt.Classifier, checkpoint: Path, rows: list[dict[str, Any]], task: str) -> float:
    """Compare a bundle with `transformers` on rows; return the accuracy, or the mean absolute error."""
    if task == "multiple-choice":
        found = [classifier.choose(row["context"], row["choices"]) for row in rows]
        right = 0
        for row, each in zip(rows, found, strict=True):
            scores = theirs(checkpoint, [(row["context"], choice) for choice in row["choices"]])[:, 0]
            np.testing.assert_allclose(each.logits, scores, rtol=1e-4, atol=1e-4)
            answer = row["answer"]
            right += each.label == (row["choices"][answer] if isinstance(answer, int) else answer)
        return right / len(rows)
    keys = {"classification": ("text",), "entailment": ("premise", "hypothesis"), "similarity": ("text", "text_pair")}
    texts = [tuple(row[key] for key in keys[task]) for row in rows]
    asked: list[Any] = [each[0] for each in texts] if task == "classification" else texts
    logits = theirs(checkpoint, asked)
    if task == "similarity":
        logits = logits + theirs(checkpoint, [(b, a) for a, b in texts])
    results = classifier.classify(asked)
    np.testing.assert_allclose(np.stack([each.logits for each in results]), logits, rtol=1e-4, atol=1e-4)
    labels = [row["label"] for row in rows]
    if task == "similarity":
        assert classifier.labels == ("score",)
        return float(np.abs(logits[:, 0] - np.array(labels)).mean())
    return sum(each.label == str(label) for each, label in zip(results, labels, strict=True)) / len(rows)


def test_a_tokenizer_of_another_kind_gets_the_tokens_too(tmp_path: Path) -> None:
    folder = tokenizer_kinds.make("gpt1_json", tmp_path / "model")
    rows = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    write_checkpoint(tmp_path / "weights", family="openai-gpt", vocab_size=rows)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tmp_path / "weights" / name).read_bytes())
    data = write_rows(tmp_path / "data.jsonl", rows_of("entailment"))
    result = run("entailment", data, "--from", folder, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    with ortgpt.load_classifier(tmp_path / "out" / "bundle") as classifier:
        assert classifier.bundle.manifest.tokenizer.kind == "tokenizer-json"
        check(classifier, tmp_path / "out" / "checkpoint", rows_of("entailment")[:4], "entailment")


def test_a_quantised_bundle_is_measured_on_the_held_out_rows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", n_embd=64)
    data = write_rows(tmp_path / "data.jsonl", rows_of("similarity", 64))
    result = run(
        "similarity", data, "--from", tmp_path / "model", "-o", tmp_path / "out", "--dtype", "int8",
        "--held-out-share", "0.5",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    with ortgpt.load_classifier(tmp_path / "out" / "bundle") as classifier:
        agreement = classifier.bundle.manifest.agreement
    assert agreement is not None
    assert (agreement.text, agreement.texts) == ("held-out.jsonl", 64)


def test_texts_beyond_the_context_are_cut_and_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    rows = rows_of("classification")
    for row in rows[:3]:
        row["text"] += " truth" * 100
    data = write_rows(tmp_path / "data.jsonl", rows)
    result = run("classification", data, "--from", tmp_path / "model", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "3 of 40 rows are longer than the context of 64 tokens; their texts lose the end\n" in result.stderr


def test_losses_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_checkpoint(tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", rows_of("classification"))
    command = ["classification", data, "--from", tmp_path / "model", "-o", tmp_path / "out", "--plot"]
    result = run(*command, tmp_path / "plot.svg")
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    result = run(*command, tmp_path / "plot.pdf")
    assert result.exit_code == 2
    assert "(accepted: a file in an existing folder that ends in .png or .svg)" in result.stderr


def test_bad_rows_are_named_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    good = rows_of("classification", 4)
    bad: list[Any] = [
        5, {"text": "a"}, {"text": "a", "label": None}, {"text": " ", "label": "x"}, {"text": "a", "label": True},
        {"text": "a", "text_pair": "b", "label": "x"}, {"context": "a", "choices": ["b", "c"], "label": 1},
    ]  # fmt: skip
    data = write_rows(tmp_path / "data.jsonl", [*good, *bad])
    result = run("classification", data, "--from", tmp_path / "model", "-o", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"Error: {data} has 7 rows that cannot be used: line 5: 5 (accepted: a JSON object); line 6: "
    )
    assert 'line 6: no "label"' in line
    assert "line 7: label = None" in line
    assert "line 8: text = ' '" in line
    assert "line 9: label = True" in line
    assert line.endswith("; and 2 more")
    assert not (tmp_path / "out").exists()


def test_a_value_that_no_float32_squares_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    rows = [*rows_of("similarity", 4), {"text": "a", "text_pair": "b", "label": 1e39}]
    data = write_rows(tmp_path / "data.jsonl", rows)
    result = run("similarity", data, "--from", tmp_path / "model", "-o", tmp_path / "out")
    assert "line 5: label = 1e+39 (accepted for a regression: -1e+18 to 1e+18)" in result.stderr
    assert (result.exit_code, (tmp_path / "out").exists()) == (1, False)


@pytest.mark.parametrize(
    ("task", "rows", "reason"),
    [
        ("classification", [], "has no row"),
        ("classification", [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "all 2 rows have the label 'x'"),
        ("entailment", [{"text": "a", "label": "x"}], "line 1: text = 'a' is not a pair"),
        ("classification", [{"text": "a", "text_pair": "b", "label": "x"}], "line 1: the row is a pair"),
        ("multiple-choice", [{"text": "a", "label": "x"}], "line 1: text = 'a' has no choices"),
        (
            "multiple-choice",
            [{"context": "a", "choices": ["b", "c"]}],
            'line 1: no "answer" (accepted: an integer from',
        ),
        ("multiple-choice", [{"context": "a", "choices": ["b", "c"], "answer": 2}], "line 1: answer = 2"),
        ("multiple-choice", [{"context": "a", "choices": ["b"], "answer": 0}], "two or more texts"),
        ("similarity", [{"text": "a", "text_pair": "b"}], 'line 1: no "label"'),
    ],
)
def test_data_that_cannot_be_learnt_from_are_one_line(tmp_path: Path, task: str, rows: list[Any], reason: str) -> None:
    write_checkpoint(tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", rows)
    result = run(task, data, "--from", tmp_path / "model", "-o", tmp_path / "out")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    assert reason in result.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.training").exists()


def test_checkpoints_that_cannot_be_fine_tuned_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    data = write_rows(tmp_path / "data.jsonl", rows_of("classification"))
    write_classifier(tmp_path / "classifier")
    result = run("classification", data, "--from", tmp_path / "classifier", "-o", tmp_path / "out")
    assert "is a classifier (GPT2ForSequenceClassification); name the language model" in result.stderr
    result = run("classification", data, "--from", tmp_path / "model", "--tokenizer", "none", "-o", tmp_path / "out")
    assert "has no tokenizer, and a task needs one" in result.stderr
    (tmp_path / "out").mkdir()
    result = run("classification", data, "--from", tmp_path / "model", "-o", tmp_path / "out")
    assert (result.exit_code, "out already exists" in result.stderr) == (1, True), result.output
