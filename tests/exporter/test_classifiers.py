"""Bundles of classifiers compute what `transformers` computes, run outside ortgpt, and are quantised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoConfig

import ortgpt
from classifiers import CLASSES, Exported, oracle, write_classifier
from ortgpt_exporter import ExportError, Quantization, export_bundle, judges, quantize_bundle
from ortgpt_exporter.checkpoint.load import CheckpointSource
from ortgpt_exporter.evaluation.agreement import random_rows
from ortgpt_exporter.sweep import sweep_bundle

ROWS = [[5, 9, 2, 0, 0], [7], [int(each) for each in np.arange(64) * 3 % 300], [1, 2], [9] * 33]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("flavour", ["native", "portable"])
@pytest.mark.parametrize("kind", [*CLASSES])
def test_a_bundle_computes_what_transformers_does(tmp_path: Path, kind: str, flavour: str, dtype: str) -> None:
    model = write_classifier(tmp_path / "checkpoint", kind)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", flavour=flavour, dtype=dtype)
    manifest = bundle.manifest
    assert manifest.task == ("token-classification" if kind == "token" else "text-classification")
    assert [(graph.role, graph.cache) for graph in manifest.graphs] == [("classifier", None)]
    assert all(check.passed for check in manifest.verification)
    assert [check.name for check in manifest.verification][-1] == "ragged batch"
    assert not {"generation_config.json", "genai_config.json"} & manifest.files.keys()
    accepted = {"float32": 1e-4, "float16": 2e-2}[dtype]
    with ortgpt.load_classifier(bundle.path) as classifier:
        for found, expected in zip(classifier.logits(ROWS), oracle(model, ROWS), strict=True):
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= accepted * max(1, np.abs(expected).max())


def test_config_json_stays_that_of_transformers(text_classifier: Exported) -> None:
    config = AutoConfig.from_pretrained(text_classifier.bundle)
    assert config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert config.label2id == {"bad": 0, "fair": 1, "good": 2}
    assert config.architectures == ["GPT2ForSequenceClassification"]
    assert config.problem_type == "single_label_classification"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["text", "token"])
def test_a_portable_graph_runs_by_the_names_of_optimum(tmp_path: Path, kind: str, side: str) -> None:
    model = write_classifier(tmp_path / "checkpoint", kind, pad_token_id=299)
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", flavour="portable")
    graph = onnx.load(tmp_path / "bundle" / "model.onnx")
    assert {node.domain for node in graph.graph.node} == {""}
    session = onnxruntime.InferenceSession(tmp_path / "bundle" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [each.name for each in session.get_outputs()] == ["logits"]
    ids, mask = (np.full((len(ROWS), 64), fill, np.int64) for fill in (299, 0))
    places = [slice(0, len(row)) if side == "right" else slice(64 - len(row), 64) for row in ROWS]
    for index, (row, place) in enumerate(zip(ROWS, places, strict=True)):
        ids[index, place], mask[index, place] = row, 1
    (logits,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    for found, place, expected in zip(logits, places, oracle(model, ROWS), strict=True):
        np.testing.assert_allclose(found if kind == "text" else found[place], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_padded_batch_is_that_of_transformers(tmp_path: Path) -> None:
    """Where the texts do not end with the padding id, both take the logits of the same token."""
    model = write_classifier(tmp_path / "checkpoint", pad_token_id=299)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    rows = [row for row in ROWS if row[-1] != 299]
    ids = torch.full((len(rows), 64), 299)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    expected = model(input_ids=ids, attention_mask=(ids != 299).long()).logits.numpy()
    with ortgpt.load_classifier(bundle.path) as classifier:
        np.testing.assert_allclose(np.stack(classifier.logits(rows)), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_text_that_ends_with_the_padding_id_keeps_its_last_token(tmp_path: Path) -> None:
    model = write_classifier(tmp_path / "checkpoint", pad_token_id=0)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    with ortgpt.load_classifier(bundle.path) as classifier:
        (found,) = classifier.logits([[5, 9, 0]])
    hidden = model.transformer(torch.tensor([[5, 9, 0]])).last_hidden_state[0]
    np.testing.assert_allclose(found, model.score(hidden[2]).numpy(), rtol=1e-4, atol=1e-4)
    theirs = model(torch.tensor([[5, 9, 0]])).logits[0].numpy()
    np.testing.assert_allclose(theirs, model.score(hidden[1]).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("source", "choices", "reason"),
    [
        ({}, {"target": "cuda"}, "is for language models so far"),
        ({"eos_token_id": 5}, {}, "eos_token_id would have no effect"),
        ({"bos_token_id": 5, "eos_token_id": 5}, {}, "bos_token_id and eos_token_id would have no effect"),
    ],
)
def test_what_a_classifier_cannot_have_is_refused(
    text_classifier: Exported, tmp_path: Path, source: dict[str, Any], choices: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        export_bundle(CheckpointSource(text_classifier.checkpoint, **source), tmp_path / "bundle", **choices)
    assert not (tmp_path / "bundle").exists()


def test_an_adapter_is_refused_with_the_way_to_merge_it(text_classifier: Exported, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "adapter").mkdir()
    source = CheckpointSource(text_classifier.checkpoint, adapter=tmp_path / "adapter")
    with pytest.raises(ExportError, match="merge_and_unload"):
        export_bundle(source, tmp_path / "bundle")


def test_ids_of_a_larger_vocabulary_do_not_hinder(tmp_path: Path) -> None:
    write_classifier(tmp_path / "checkpoint", bos_token_id=50256, eos_token_id=50256)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    assert (bundle.config.bos_token_id, bundle.config.eos_token_ids) == (None, ())


def _softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return torch.softmax(torch.from_numpy(logits).double(), -1).numpy()


@pytest.mark.parametrize("flavour", ["native", "portable"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantised_classifier_agrees_with_float32(tmp_path: Path, flavour: str, dtype: str) -> None:
    model = write_classifier(tmp_path / "checkpoint", n_embd=64)
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"the text number {index} of 20{' and more' * index}\n" for index in range(20)))
    request = Quantization(dtype=dtype, eval_text=lines, max_kl=1.0)
    bundle = export_bundle(
        tmp_path / "checkpoint", tmp_path / "bundle", flavour=flavour, dtype=dtype, quantization=request
    )
    agreement = bundle.manifest.agreement
    assert agreement is not None
    assert bundle.manifest.evidence is None
    assert (agreement.text, agreement.texts, agreement.labelled) == ("lines.txt", 20, 20)
    assert agreement.left_out["score.weight"] == "is small"
    assert sum(agreement.matrices.values()) == 10
    with ortgpt.load_classifier(bundle.path) as classifier:
        rows = [ids[:64] for ids in map(classifier.tokenizer.encode, lines.read_text().splitlines())]
        found, expected = np.stack(classifier.logits(rows, batch_tokens=1)), np.stack(oracle(model, rows))
    kl = (_softmax(expected) * (np.log(_softmax(expected)) - np.log(_softmax(found)))).sum(-1).mean()
    assert agreement.kl == pytest.approx(kl, rel=0.05)
    assert agreement.kl is not None
    assert agreement.kl < {"int8": 0.005, "int4": 0.3}[dtype]
    assert agreement.same_labels == pytest.approx((found.argmax(-1) == expected.argmax(-1)).mean())
    assert agreement.max_abs_diff == pytest.approx(np.abs(found - expected).max(), rel=0.02)
    promise = bundle.manifest.precision.promise
    assert promise.kind == "bounded"
    assert promise.logit_bound is not None
    assert promise.argmax_changes_in_prefill is None


@pytest.mark.parametrize("config", [{}, {"problem_type": "multi_label_classification"}], ids=str)
def test_probabilities_that_differ_too_much_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    model = write_classifier(tmp_path / "checkpoint", n_embd=64, **config)
    source = export_bundle(tmp_path / "checkpoint", tmp_path / "float32")
    bundle = quantize_bundle(source.path, tmp_path / "int8", Quantization(dtype="int8"))
    agreement = bundle.manifest.agreement
    assert agreement is not None
    assert (agreement.text, agreement.texts) == ("random tokens", 64)
    with ortgpt.load_classifier(bundle.path) as classifier:
        rows = random_rows(classifier)
        found, expected = np.stack(classifier.logits(rows, batch_tokens=1)), np.stack(oracle(model, rows))
    if config:
        kl, held = _bernoulli_kl(expected, found), np.all((found >= 0) == (expected >= 0), axis=1)
    else:
        kl = (_softmax(expected) * (np.log(_softmax(expected)) - np.log(_softmax(found)))).sum(-1)
        held = found.argmax(-1) == expected.argmax(-1)
    assert agreement.kl == pytest.approx(kl.mean(), rel=0.05)
    assert agreement.same_labels == pytest.approx(held.mean(), abs=0.02)
    assert agreement.kl is not None
    request = Quantization(dtype="int8", max_kl=agreement.kl / 2)
    with pytest.raises(ExportError, match=r"loses too much accuracy: KL .*; try .*a larger max_kl"):
        quantize_bundle(source.path, tmp_path / "out", request)
    assert not (tmp_path / "out").exists()


def _bernoulli_kl(expected: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    p, q = (torch.distributions.Bernoulli(logits=torch.from_numpy(each).double()) for each in (expected, found))
    kl: npt.NDArray[np.float64] = torch.distributions.kl_divergence(p, q).sum(-1).numpy()
    return kl


def test_values_that_differ_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_classifier(tmp_path / "checkpoint", n_embd=64, num_labels=1)
    source = export_bundle(tmp_path / "checkpoint", tmp_path / "float32")
    bundle = quantize_bundle(source.path, tmp_path / "int8", Quantization(dtype="int8"))
    agreement = bundle.manifest.agreement
    assert agreement is not None
    assert (agreement.kl, agreement.same_labels) == (None, None)
    with ortgpt.load_classifier(bundle.path) as classifier:
        rows = random_rows(classifier)
        found, expected = np.stack(classifier.logits(rows, batch_tokens=1)), np.stack(oracle(model, rows))
    difference = float(np.abs(found - expected).max())
    assert agreement.max_abs_diff == pytest.approx(difference, rel=0.02)
    part = difference / float(expected.max() - expected.min())
    assert 0 < part < 0.05
    monkeypatch.setitem(judges._MAX_PART, "int8", part / 2)
    with pytest.raises(ExportError, match=r"a value differs by .* of the range of the values"):
        quantize_bundle(source.path, tmp_path / "out", Quantization(dtype="int8"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"max_perplexity_ratio": 1.5}, "max_perplexity_ratio would have no effect"),
    ],
)
def test_choices_that_a_classifier_cannot_have_are_refused(
    text_classifier: Exported, tmp_path: Path, choices: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        quantize_bundle(text_classifier.bundle, tmp_path / "out", Quantization(dtype="int8", **choices))


def test_too_few_lines_to_measure_on_are_refused(text_classifier: Exported, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("one\n\ntwo\n")
    request = Quantization(dtype="int8", eval_text=tmp_path / "few.txt")
    with pytest.raises(ExportError, match="has 2 lines with a text"):
        quantize_bundle(text_classifier.bundle, tmp_path / "out", request)


def test_a_sweep_of_a_classifier_is_refused(text_classifier: Exported) -> None:
    with pytest.raises(ExportError, match="a sweep compares language models"):
        sweep_bundle(text_classifier.bundle)


def test_calibration_by_a_text(tmp_path: Path) -> None:
    write_classifier(tmp_path / "checkpoint", "token", n_embd=64)
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 50)
    request = Quantization(dtype="int4", method="gptq", calibration=tmp_path / "text.txt", max_kl=2.0)
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", dtype="int4", quantization=request)
    assert bundle.manifest.agreement is not None
    assert 0 < (bundle.manifest.agreement.kl or math.inf) < 2.0
