"""Classifiers that read pairs of texts or rank choices answer as `transformers` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

import ortgpt
from classifiers import EXTRACT, oracle, pair_oracle, write_pair_classifier
from ortgpt.bundle.manifest import PairTemplate, Template
from ortgpt.cli.main import main
from ortgpt_exporter import ExportError, Quantization, export_bundle
from ortgpt_exporter.checkpoint.surroundings import template_of
from support import reseal

PAIRS = [("It is a truth", "a single man"), ("a", "b"), ("Café", "universally acknowledged, in want of a wife")]
START, DELIMITER_ID, EXTRACT_ID = 0, 300, 301


@pytest.mark.parametrize("flavour", ["native", "portable"])
@pytest.mark.parametrize(("task", "kind"), [("entailment", "text"), (None, "text"), ("similarity", "gpt1")])
def test_pairs_get_the_logits_of_transformers(tmp_path: Path, task: str | None, kind: str, flavour: str) -> None:
    model = write_pair_classifier(tmp_path / "checkpoint", task, kind)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", flavour=flavour)
    assert bundle.manifest.tokenizer.kind == "byte-level-bpe"
    assert bundle.manifest.tokenizer.template == Template(
        before=(START,),
        after=(EXTRACT_ID,),
        pair=PairTemplate(before=(START,), between=(DELIMITER_ID,), after=(EXTRACT_ID,)),
    )
    expected = pair_oracle(model, tmp_path / "checkpoint", PAIRS)
    if task == "similarity":
        expected = expected + pair_oracle(model, tmp_path / "checkpoint", [(b, a) for a, b in PAIRS])
    with ortgpt.load_classifier(bundle.path) as classifier:
        assert classifier.finetuning_task == task
        results = classifier.classify(PAIRS)
        for result, logits in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.logits, logits, rtol=1e-4, atol=1e-4)
            probabilities = torch.softmax(torch.from_numpy(logits).double(), -1).tolist()
            assert list(result.probabilities.values()) == pytest.approx(probabilities, abs=1e-4)
        assert classifier.classify(PAIRS[1:2]) == results[1:2]
    if flavour == "portable":
        theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("checkpoint", "bundle"))
        assert theirs(*PAIRS[0])["input_ids"] == ours(*PAIRS[0])["input_ids"]
        assert ours("a")["input_ids"][-1] == EXTRACT_ID


def test_a_single_text_is_surrounded_too(tmp_path: Path) -> None:
    model = write_pair_classifier(tmp_path / "checkpoint", None, "text")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    texts = ["It is a truth", f"plain {EXTRACT}"]
    with ortgpt.load_classifier(bundle.path) as classifier:
        rows = [[START, *classifier.tokenizer.encode(text), EXTRACT_ID] for text in texts]
        assert rows[0] == AutoTokenizer.from_pretrained(tmp_path / "checkpoint")(texts[0])["input_ids"]
        assert EXTRACT_ID not in rows[1][:-1], "the name of a special token in a text is plain text"
        for result, logits in zip(classifier.classify(texts), oracle(model, rows), strict=True):
            np.testing.assert_allclose(result.logits, logits, rtol=1e-4, atol=1e-4)
        assert classifier.token_rows([*texts, PAIRS[0]])[:2] == rows


def test_tokens_have_spans_beside_those_around_the_text(tmp_path: Path) -> None:
    write_pair_classifier(tmp_path / "checkpoint", None, "token")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    with ortgpt.load_classifier(bundle.path) as classifier:
        (result,) = classifier.classify(["It is"])
        first, *inner, last = [(token.start, token.end) for token in result.tokens]
        assert (first, last) == ((None, None), (None, None))
        assert (inner[0][0], inner[-1][1]) == (0, 5)
        with pytest.raises(ortgpt.PromptError, match=r"texts\[0\] is a pair, and what gets a label is a single text"):
            classifier.classify([("a", "b")])


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    folder = tmp_path_factory.mktemp("choices")
    model = write_pair_classifier(folder / "checkpoint", "multiple-choice", num_labels=1)
    export_bundle(folder / "checkpoint", folder / "bundle")
    return model, folder / "checkpoint", folder / "bundle"


CONTEXT, CHOICES = "It is a truth", ["a single man", "wife", "Café"]


def test_choices_are_ranked_by_the_scores_of_transformers(choosing: tuple[Any, Path, Path]) -> None:
    model, checkpoint, bundle = choosing
    scores = pair_oracle(model, checkpoint, [(CONTEXT, choice) for choice in CHOICES])[:, 0]
    with ortgpt.load_classifier(bundle) as classifier:
        result = classifier.choose(CONTEXT, CHOICES)
    np.testing.assert_allclose(result.logits, scores, rtol=1e-4, atol=1e-4)
    expected = torch.softmax(torch.from_numpy(scores).double(), -1).tolist()
    assert list(result.probabilities) == CHOICES
    assert list(result.probabilities.values()) == pytest.approx(expected, abs=1e-4)
    assert result.label == CHOICES[int(scores.argmax())]
    assert result.labels == [result.label]


@pytest.mark.parametrize(
    ("context", "choices", "reason"),
    [
        ("a", ["b"], r"choices with \['b'\] .*two or more"),
        ("a", "bc", "choices with 'bc'"),
        ("a", ["b", ""], "choices with ''"),
        ("a", ["b", 5], "choices with 5"),
        ("a", ["b", "c", "b"], "'b' is among the choices more than once"),
        (5, ["b", "c"], "context = 5"),
        ("a" * 70, ["b", "c"], "context has .* tokens, more than the model's context of 64"),
    ],
)
def test_choices_that_cannot_be_ranked_are_refused(
    choosing: tuple[Any, Path, Path], context: Any, choices: Any, reason: str
) -> None:
    with ortgpt.load_classifier(choosing[2]) as classifier, pytest.raises(ValueError, match=reason):
        classifier.choose(context, choices)


def test_what_a_bundle_does_not_read_is_refused(choosing: tuple[Any, Path, Path], tmp_path: Path) -> None:
    with ortgpt.load_classifier(choosing[2]) as classifier:
        for text in ("a", ("a", "b"), [5]):
            with pytest.raises(
                ortgpt.PromptError, match=r"texts\[0\] = .* the task multiple-choice ranks choices .*choose\(\)"
            ):
                classifier.classify([text])
    for task, wrong, reason in (
        ("classification", ("a", "b"), "what gets a label is a single text"),
        ("entailment", "a", "is not a pair, and the task entailment reads pairs"),
        ("similarity", [5, 6], "is not a pair, and the task similarity reads pairs"),
    ):
        write_pair_classifier(tmp_path / task, task)
        with ortgpt.load_classifier(export_bundle(tmp_path / task, tmp_path / f"{task}-bundle").path) as classifier:
            with pytest.raises(ortgpt.PromptError, match=reason):
                classifier.classify([wrong])
            with pytest.raises(ortgpt.PromptError, match="context has choices, and what is asked for is a label"):
                classifier.choose("a", ["b", "c"])
            if task == "entailment":
                ids = [START, 5, DELIMITER_ID, 6, EXTRACT_ID]
                assert classifier.token_rows([ids]) == [ids]


def test_rows_of_a_file_are_pairs_or_choices(choosing: tuple[Any, Path, Path], tmp_path: Path) -> None:
    write_pair_classifier(tmp_path / "checkpoint", "entailment")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle").path
    with ortgpt.load_classifier(bundle) as classifier:
        (expected,) = classifier.classify([("a", "b")])
    rows = [
        {"text": "a", "text_pair": "b", "id": 7},
        {"premise": "a", "hypothesis": "b", "label": "yes"},
        {"sentence1": "a", "sentence2": "b"},
        {"text": "a"},
        {"premise": "a"},
        {"premise": "a", "hypothesis": 5},
        {"text": "a", "text_pair": "b", "premise": "c"},
        {"context": "a", "choices": ["b", "c"]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, ["classify", str(bundle), "--json", "--input", str(tmp_path / "in.jsonl")])
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record.get("probabilities") for record in records[:3]] == [expected.probabilities] * 3
    assert (records[0]["text_pair"], records[0]["id"]) == ("b", 7)
    assert (records[1]["premise"], records[1]["hypothesis"], records[1]["expected"]) == ("a", "b", "yes")
    messages = [record["error"]["message"] for record in records[3:]]
    for message, reason in zip(messages, (
        "the text = 'a' is not a pair", "premise alone", "hypothesis = 5 (accepted: two texts)",
        "text, premise, text_pair together", "the row has choices, and what is asked for is a label",
    ), strict=True):  # fmt: skip
        assert message.startswith(reason)
    pair = CliRunner().invoke(main, ["classify", str(bundle), "--pair", "a", "b"])
    assert pair.stdout == f"{expected.label}  {expected.probabilities[str(expected.label)]:.4f}\n"
    (tmp_path / "choices.jsonl").write_text(json.dumps({"context": CONTEXT, "choices": CHOICES, "answer": 1}) + "\n")
    arguments = ["classify", str(choosing[2]), "--json", "--input", str(tmp_path / "choices.jsonl")]
    record = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert (record["context"], record["choices"], record["answer"]) == (CONTEXT, CHOICES, 1)
    assert list(record["probabilities"]) == CHOICES


def test_a_token_around_a_text_needs_a_row_in_the_model(tmp_path: Path) -> None:
    write_pair_classifier(tmp_path / "checkpoint", None)
    path = tmp_path / "checkpoint" / "tokenizer.json"
    values = json.loads(path.read_text())
    values["post_processor"]["special_tokens"][EXTRACT]["ids"] = [302]
    path.write_text(json.dumps(values))
    with pytest.raises(
        ExportError, match=r"puts the token id 302 around a text, .* no row for it \(accepted: 0 to 301\)"
    ):
        export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_template_beyond_the_vocabulary_is_refused_at_load(choosing: tuple[Any, Path, Path], tmp_path: Path) -> None:
    export_bundle(choosing[1], tmp_path / "bundle")
    reseal(tmp_path / "bundle", lambda manifest: manifest["tokenizer"]["template"].update(before=[302]))
    with pytest.raises(ortgpt.BundleError, match=r"tokenizer.template has the id 302 \(accepted: 0 to 301\)"):
        ortgpt.load_classifier(tmp_path / "bundle")
    for before in (5, [-1], ["a"], [True]):
        reseal(tmp_path / "bundle", lambda manifest, b=before: manifest["tokenizer"]["template"].update(before=b))  # type: ignore[misc]
        with pytest.raises(ortgpt.BundleError, match=r"tokenizer.template.before"):
            ortgpt.load_classifier(tmp_path / "bundle")


def test_a_quantised_bundle_reads_pairs(tmp_path: Path) -> None:
    write_pair_classifier(tmp_path / "checkpoint", "similarity", n_embd=64)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"text {n}", "text_pair": "b" * (n + 1)}) + "\n" for n in range(16)))
    request = Quantization(dtype="int8", eval_text=rows, max_kl=1.0)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", dtype="int8", quantization=request)
    assert bundle.manifest.agreement is not None
    assert (bundle.manifest.agreement.text, bundle.manifest.agreement.texts) == ("rows.jsonl", 32), "both orders"
    assert bundle.manifest.tokenizer.template is not None
    with ortgpt.load_classifier(bundle.path) as classifier:
        first, second = (classifier.classify([pair])[0].logits for pair in (("a", "b"), ("b", "a")))
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_templates_are_measured() -> None:
    bert = {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]}
    pair = PairTemplate(before=(1,), between=(2,), after=(2,))
    assert template_of(bert) == Template(before=(1,), after=(2,), pair=pair)
    assert template_of(
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    ) == Template(before=(), after=())
    sequence = {"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"x": {"id": "x", "ids": [7, 8], "tokens": ["x", "y"]}}
    single = {"type": "TemplateProcessing", "single": [*sequence], "pair": [], "special_tokens": tokens}
    twice = single | {"single": [*sequence, sequence[1]]}
    assert template_of(twice) is None
    with pytest.raises(ortgpt.BundleError, match="post_processor: "):
        template_of({"type": "Unheard"})
