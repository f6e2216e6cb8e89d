"""Classifiers are loaded as `transformers` loads them: body, head and labels; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from classifiers import oracle, write_classifier
from ortgpt_models import ClassifierConfig, GPTClassifier, ModelError, load_gpt, load_network

ROWS = [[5, 9, 2], [7], [int(each) for each in torch.arange(1, 65)]]


def load(folder: Path) -> tuple[GPTClassifier, list[str]]:
    notes: list[str] = []
    network = load_network(folder, on_note=notes.append)
    assert isinstance(network, GPTClassifier)
    return network, notes


def edit(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


def rename(folder: Path, new_name: Any) -> None:
    """Rename or leave out (None) tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    named = {new_name(name): tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in named.items() if name is not None}, folder / "model.safetensors")


@torch.no_grad()
def logits(network: GPTClassifier, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = network(torch.tensor([ids]))[0]
    return found if network.config.labels_tokens else found[-1]


@pytest.mark.parametrize("kind", ["text", "gpt1", "token"])
def test_the_network_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    model = write_classifier(tmp_path, kind)
    network, notes = load(tmp_path)
    assert notes == []
    for ids, expected in zip(ROWS, oracle(model, ROWS), strict=True):
        torch.testing.assert_close(logits(network, ids), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
        chosen = network(torch.tensor([ids]), logit_positions=torch.tensor([[len(ids) - 1]]))[0, 0]
        torch.testing.assert_close(chosen, logits(network, ids).reshape(-1, 3)[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["float16", "shards", "module."])
def test_every_form_of_the_weights_is_read(tmp_path: Path, form: str) -> None:
    model = write_classifier(tmp_path, "text")
    if form == "float16":
        model = model.half().float()
        model.half().save_pretrained(tmp_path)
        model = model.float()
    elif form == "shards":
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="50KB")
        assert (tmp_path / "model.safetensors.index.json").exists()
    else:
        rename(tmp_path, lambda name: form + name)
    network, notes = load(tmp_path)
    assert bool(notes) == (form == "module.")
    for ids, expected in zip(ROWS, oracle(model, ROWS), strict=True):
        torch.testing.assert_close(logits(network, ids), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_a_head_of_a_language_model_is_left_out_with_a_note(tmp_path: Path) -> None:
    model = write_classifier(tmp_path, "text")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(300, 48)}, tmp_path / "model.safetensors")
    network, (note,) = load(tmp_path)
    assert "left out" in note
    assert "lm_head.weight" in note
    torch.testing.assert_close(logits(network, ROWS[0]), torch.from_numpy(oracle(model, ROWS)[0]))


def test_a_head_that_does_not_fit_is_a_fault_beside_others(tmp_path: Path) -> None:
    write_classifier(tmp_path, "text")
    rename(tmp_path, lambda name: None if name in ("score.weight", "transformer.ln_f.bias") else name)
    with pytest.raises(ModelError, match=r"missing ln_f.bias \(48,\); missing score.weight \(3, 48\)"):
        load_network(tmp_path)
    write_classifier(tmp_path, "token")
    edit(tmp_path, id2label={str(index): f"L{index}" for index in range(5)})
    reason = r"classifier.weight has shape \(3, 48\), expected \(5, 48\); .*classifier.bias has shape \(3,\)"
    with pytest.raises(ModelError, match=reason):
        load_network(tmp_path)


def test_a_head_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    write_classifier(tmp_path, "text")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["score.weight"][1, 2] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"score\.weight holds NaN"):
        load_network(tmp_path)


def test_load_gpt_still_takes_the_language_model(tmp_path: Path) -> None:
    write_classifier(tmp_path, "text")
    notes: list[str] = []
    load_gpt(tmp_path, on_note=notes.append)
    assert any("only its language model was taken" in note for note in notes)


TEXT = {"architectures": ["GPT2ForSequenceClassification"]}


@pytest.mark.parametrize(
    ("values", "labels", "problem_type"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "single_label_classification"),
        ({"num_labels": 1}, ("LABEL_0",), "regression"),
        ({"_num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "single_label_classification"),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), "single_label_classification"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "multi_label_classification"),
        ({"id2label": {"0": "x"}, "problem_type": "multi_label_classification"}, ("x",), "multi_label_classification"),
    ],
)
def test_labels_and_problem_type_have_the_defaults_of_transformers(
    values: dict[str, Any], labels: tuple[str, ...], problem_type: str
) -> None:
    config = ClassifierConfig.from_dict(TEXT | values)
    assert config is not None
    assert (config.labels, config.problem_type) == (labels, problem_type)
    assert ClassifierConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "values",
    [
        {"id2label": {"0": "a", "1": "b"}, "num_labels": 3},
        {"id2label": {"0": "a", "1": "b"}, "num_labels": 1},
        {"id2label": {"0": "a", "1": "b"}, "num_labels": 2},
        {"id2label": {"0": "a", "1": "b"}, "num_labels": 2.0},
        {"id2label": {"0": "a", "1": "b"}, "_num_labels": 3},
        {"id2label": {"0": "a", "5": "b"}, "num_labels": 3},
        {"id2label": {"0": "a", "1": "a"}, "num_labels": 1},
        {"id2label": {}, "num_labels": 2},
    ],
)
def test_a_number_of_labels_beside_names_is_read_as_transformers_reads_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"model_type": "gpt2"} | values))
    config = ClassifierConfig.from_dict(TEXT | values)
    assert config is not None
    assert dict(enumerate(config.labels)) == AutoConfig.from_pretrained(tmp_path).id2label


def test_names_that_are_replaced_are_noted(tmp_path: Path) -> None:
    write_classifier(tmp_path, "text")
    edit(tmp_path, id2label={"0": "a", "1": "b"}, num_labels=3)
    network, notes = load(tmp_path)
    assert network.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert [note for note in notes if "num_labels" in note] == [
        "model.safetensors: num_labels = 3 with 2 names in id2label; the labels are LABEL_0 to LABEL_2, as in "
        "`transformers` 5"
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"problem_type": "ranking"}, "problem_type = 'ranking'"),
        ({"num_labels": 0}, "num_labels = 0"),
        ({"num_labels": True}, "num_labels = True"),
        ({"num_labels": 10**9}, "num_labels = 1000000000"),
        ({"id2label": {}}, "id2label = {}"),
        ({"id2label": ["a"]}, r"id2label = \['a'\]"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label has the keys 0, 2"),
        ({"id2label": {"0": "a", "1": None}}, "a name that is neither a text nor a number"),
        ({"id2label": {"0": "a", "1": "b\ud800"}}, "which has half a character"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label names 'a' more than once"),
        ({"num_labels": 3.0}, r"num_labels = 3\.0 \(accepted: an integer from 1 to"),
        ({"num_labels": 3.0, "id2label": {"0": "a", "1": "b"}}, r"num_labels = 3\.0"),
        ({"num_labels": True, "id2label": {"0": "a"}}, "num_labels = True"),
        ({"num_labels": "2", "id2label": {"0": "a", "1": "b"}}, "num_labels = '2'"),
        ({"num_labels": 3, "id2label": ["a", "b"]}, r"id2label = \['a', 'b'\]"),
        ({"id2label": [], "problem_type": 1}, r"id2label = \[\].*; problem_type = 1"),
    ],
)
def test_labels_that_do_not_fit_are_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ClassifierConfig.from_dict(TEXT | values)


@pytest.mark.parametrize("architectures", [None, [], ["GPT2LMHeadModel"], "GPT2ForSequenceClassification", [3]])
def test_other_architectures_are_no_classifiers(architectures: Any) -> None:
    assert ClassifierConfig.from_dict({"architectures": architectures}) is None
