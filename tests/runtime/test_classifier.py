"""Classifiers: labels and probabilities, rows independent of their companions, spans of tokens, and clear errors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

import ortgpt
from classifiers import Exported, oracle, write_classifier
from ortgpt_exporter import export_bundle
from support import TEXT, reseal

TEXTS = ["It is a truth", "a", "universally acknowledged, that a single man", "Café naïve: 日本語", "\n", " x" * 30]


@pytest.fixture(scope="module")
def classifier(text_classifier: Exported) -> Iterator[ortgpt.Classifier]:
    with ortgpt.load_classifier(text_classifier.bundle) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def of_tokens(token_classifier: Exported) -> Iterator[ortgpt.Classifier]:
    with ortgpt.load_classifier(token_classifier.bundle) as loaded:
        yield loaded


def test_the_labels_of_texts_are_those_of_transformers(
    text_classifier: Exported, classifier: ortgpt.Classifier
) -> None:
    assert classifier.labels == ("bad", "fair", "good")
    assert classifier.device == "cpu"
    rows = [classifier.tokenizer.encode(text) for text in TEXTS]
    results = classifier.classify(TEXTS)
    assert [type(each) for each in results] == [ortgpt.Classification] * len(TEXTS)
    for result, logits in zip(results, oracle(text_classifier.model, rows), strict=True):
        np.testing.assert_allclose(result.logits, logits, rtol=1e-4, atol=1e-4)
        assert result.logits.dtype == np.float32
        expected = torch.softmax(torch.from_numpy(logits).double(), -1).tolist()
        assert result.probabilities == pytest.approx(dict(zip(classifier.labels, expected, strict=True)), abs=1e-4)
        assert result.label == classifier.labels[int(logits.argmax())]
        assert result.labels == [result.label]
    assert len({result.label for result in results}) > 1, "texts that differ"
    assert classifier.classify(rows) == results
    assert classifier.classify([np.array(rows[0])]) == results[:1]
    assert classifier.classify(text for text in TEXTS) == results
    assert classifier.classify([]) == []


def test_a_row_is_to_the_bit_what_it_is_alone(classifier: ortgpt.Classifier) -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(300, size=length).tolist() for length in (*range(1, 20), 63, 64)]
    together = classifier.logits(rows, batch_tokens=10**6)
    for ids, logits in zip(rows, together, strict=True):
        np.testing.assert_array_equal(classifier.logits([ids])[0], logits)
    shuffled = random.permutation(len(rows))
    for place, logits in zip(shuffled, classifier.logits([rows[index] for index in shuffled]), strict=True):
        np.testing.assert_array_equal(logits, together[place])


def test_a_token_of_a_row_is_to_the_bit_what_it_is_alone(of_tokens: ortgpt.Classifier) -> None:
    rows = [[5], [1, 2, 3], [*range(64)], [*range(7)]]
    for ids, logits in zip(rows, of_tokens.logits(rows), strict=True):
        np.testing.assert_array_equal(of_tokens.logits([ids])[0], logits)


def test_batches_hold_at_most_batch_tokens(classifier: ortgpt.Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    run = classifier._run

    def noted(rows: Any) -> Any:
        shapes.append((len(rows), max(map(len, rows))))
        return run(rows)

    monkeypatch.setattr(classifier, "_run", noted)
    rows = [[1] * length for length in (9, 2, 64, 3, 8, 1)]
    classifier.classify(rows, batch_tokens=20)
    assert shapes == [(3, 3), (2, 9), (1, 64)]
    shapes.clear()
    classifier.classify(rows)
    assert shapes == [(5, 9), (1, 64)]


def test_several_labels_hold_or_not(tmp_path: Path) -> None:
    model = write_classifier(tmp_path / "checkpoint", problem_type="multi_label_classification", num_labels=5)
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    with ortgpt.load_classifier(tmp_path / "bundle") as loaded:
        results = loaded.classify(TEXTS)
        rows = [loaded.tokenizer.encode(text) for text in TEXTS]
    for result, logits in zip(results, oracle(model, rows), strict=True):
        expected = torch.sigmoid(torch.from_numpy(logits).double()).tolist()
        assert list(result.probabilities.values()) == pytest.approx(expected, abs=1e-4)
        assert result.labels == [f"LABEL_{index}" for index, logit in enumerate(logits) if logit >= 0]
        assert result.label == f"LABEL_{logits.argmax()}"
    assert {len(result.labels) for result in results} != {1}


@pytest.mark.parametrize("config", [{"num_labels": 1}, {"num_labels": 3, "problem_type": "regression"}], ids=str)
def test_a_regression_has_values_and_no_label(tmp_path: Path, config: dict[str, Any]) -> None:
    model = write_classifier(tmp_path / "checkpoint", **config)
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    with ortgpt.load_classifier(tmp_path / "bundle") as loaded:
        results = loaded.classify(TEXTS)
        rows = [loaded.tokenizer.encode(text) for text in TEXTS]
    for result, logits in zip(results, oracle(model, rows), strict=True):
        assert (result.label, result.labels, result.probabilities) == (None, [], {})
        np.testing.assert_allclose(result.logits, logits, rtol=1e-4, atol=1e-4)


def test_the_labels_of_tokens_are_those_of_transformers(
    token_classifier: Exported, of_tokens: ortgpt.Classifier
) -> None:
    rows = [of_tokens.tokenizer.encode(text) for text in TEXTS]
    results = of_tokens.classify(TEXTS)
    for ids, result, logits in zip(rows, results, oracle(token_classifier.model, rows), strict=True):
        assert result.logits.shape == (len(ids), 3)
        np.testing.assert_allclose(result.logits, logits, rtol=1e-4, atol=1e-4)
        expected = torch.softmax(torch.from_numpy(logits).double(), -1).numpy()
        assert (result.label, result.probabilities) == (None, {})
        assert result.labels == [token.label for token in result.tokens]
        assert [token.token_id for token in result.tokens] == ids
        for token, values in zip(result.tokens, expected, strict=True):
            assert list(token.probabilities) == ["bad", "fair", "good"]
            assert list(token.probabilities.values()) == pytest.approx(values, abs=1e-4)
            assert token.label == ("bad", "fair", "good")[values.argmax()]


@pytest.mark.parametrize("text", [TEXT[:60], "Café, naïve: “日本語” 👩‍👩‍👧 ñ", "\r\n\t x  y", "\0\x7f", "é" * 20])
def test_spans_are_those_of_tokenizers(token_classifier: Exported, of_tokens: ortgpt.Classifier, text: str) -> None:
    folder = token_classifier.checkpoint
    theirs = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).encode(text)
    (result,) = of_tokens.classify([text])
    assert [token.token_id for token in result.tokens] == theirs.ids
    assert [(token.start, token.end) for token in result.tokens] == theirs.offsets
    for token in result.tokens:
        assert token.start is not None
        if "\ufffd" not in token.text:
            assert text[token.start : token.end] == token.text


def test_spans_that_are_unknown_are_none(of_tokens: ortgpt.Classifier) -> None:
    (result,) = of_tokens.classify([of_tokens.tokenizer.encode("It is")])
    assert {(token.start, token.end) for token in result.tokens} == {(None, None)}
    (pair,) = of_tokens.classify(["a\ud83d\ude00"])  # halves that the tokenizer joins to one character
    assert {(token.start, token.end) for token in pair.tokens} == {(None, None)}
    (half,) = of_tokens.classify(["a\ud83d"])
    assert half.tokens[0].start == 0


@pytest.mark.parametrize(
    ("texts", "error", "reason"),
    [
        ("a text", ortgpt.PromptError, r"for a single one, \[text\]"),
        (5, ortgpt.PromptError, "texts = 5"),
        (["a", ""], ortgpt.PromptError, r"texts\[1\] is empty"),
        ([[]], ortgpt.PromptError, r"texts\[0\] is empty"),
        ([None], ortgpt.PromptError, r"texts\[0\] = None"),
        ([[1], [300]], ortgpt.PromptError, r"texts\[1\]\[0\]: token id 300 is not in the vocabulary"),
        ([[1.5]], ortgpt.PromptError, r"texts\[0\]"),
        (["a", [1] * 65], ortgpt.ContextLengthError, r"texts\[1\] has 65 tokens, more than the model's context of 64"),
    ],
)
def test_texts_that_cannot_be_classified_are_named(
    classifier: ortgpt.Classifier, of_tokens: ortgpt.Classifier, texts: Any, error: type[Exception], reason: str
) -> None:
    for call in (classifier.classify, of_tokens.classify):
        with pytest.raises(error, match=reason):
            call(texts)


@pytest.mark.parametrize("batch_tokens", [0, -1, 1.5, "8", True])
def test_batch_tokens_is_checked(classifier: ortgpt.Classifier, batch_tokens: Any) -> None:
    with pytest.raises(ortgpt.OptionError, match="batch_tokens"):
        classifier.classify(["a"], batch_tokens=batch_tokens)


def test_each_kind_of_bundle_names_what_opens_it(text_classifier: Exported, small_bundle: Path) -> None:
    with pytest.raises(ortgpt.BundleError, match=r"is a classifier .*ortgpt.load_classifier\(\)"):
        ortgpt.load(text_classifier.bundle)
    with pytest.raises(ortgpt.BundleError, match=r"is a language model; open it with ortgpt.load\(\)"):
        ortgpt.load_classifier(small_bundle)


def test_logits_that_are_not_finite_are_refused(
    classifier: ortgpt.Classifier, of_tokens: ortgpt.Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded, call in ((classifier, classifier.classify), (of_tokens, of_tokens.classify)):
        run = loaded._run

        def damaged(rows: Any, run: Any = run) -> Any:
            logits = run(rows)
            logits[len(rows) - 1, ..., 0] = np.nan  # the longest is the last
            return logits

        monkeypatch.setattr(loaded, "_run", damaged)
        with pytest.raises(ortgpt.NonFiniteLogitsError, match=r"not finite of texts\[0\]"):
            call(["a longer text", "a"])


def test_a_closed_classifier_says_so(text_classifier: Exported) -> None:
    with ortgpt.load_classifier(text_classifier.bundle) as loaded:
        loaded.classify(["a"])
    loaded.close()
    for use in (lambda: loaded.classify(["a"]), lambda: loaded.device, lambda: pickle.dumps(loaded)):
        with pytest.raises(ortgpt.ClosedError, match="this classifier is closed"):
            use()


def test_pickling_loads_the_bundle_again(
    classifier: ortgpt.Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(classifier)
    monkeypatch.chdir(tmp_path)
    with pickle.loads(data) as again:
        assert again.classify(TEXTS) == classifier.classify(TEXTS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error(classifier: ortgpt.Classifier) -> None:
    classifier.classify(["a"])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            classifier.classify(["a"])
        except ortgpt.ClosedError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert "this classifier was loaded in another process" in said.read()
    os.waitpid(child, 0)
    assert classifier.classify(["a"])


def test_several_threads_get_the_same_answers(classifier: ortgpt.Classifier) -> None:
    expected = classifier.classify(TEXTS)
    barrier = threading.Barrier(4)

    def work(_: int) -> bool:
        barrier.wait()
        return all(classifier.classify(TEXTS) == expected for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"problem_type": None}, "problem_type = None"),
        ({"id2label": {"0": "a", "1": "b"}}, "is not the native classifier"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "id2label"),
        ({"id2label": None}, "id2label = None"),
    ],
    ids=str,
)
def test_a_config_that_says_something_else_is_refused(
    text_classifier: Exported, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(text_classifier.bundle, folder)
    values = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(values))
    reseal(folder)
    with pytest.raises(ortgpt.BundleError, match=reason):
        ortgpt.load_classifier(folder)


def test_no_torch_is_imported(text_classifier: Exported) -> None:
    script = (
        "import sys, ortgpt\n"
        f"ortgpt.load_classifier({str(text_classifier.bundle)!r}).classify(['a'])\n"
        "assert not {'torch', 'onnx', 'transformers', 'tokenizers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
