"""Figures of an evaluation: from the logits of `transformers` with formulas written here, and from numbers by hand."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ortgpt
from ortgpt import BundleError, OptionError, PromptError
from ortgpt.decode.scoring import Likelihood
from ortgpt.tools import evaluate
from ortgpt.tools.evaluate import encode_pair, evaluate_file
from ortgpt_exporter import CheckpointSource, export_bundle
from support import TEXT, write_checkpoint

CHOICES: list[dict[str, Any]] = [
    {"context": "It is a truth", "choices": ["universally", "of a", "man — 日本"], "answer": 0},
    {"context": "a single man", "choices": ["in", "in possession of it"], "answer": "in possession of it"},
    {"context": "", "choices": ["It", "wife", "naïve", "so well fixed"], "answer": 0},
    {"context": "It is a truth", "choices": ["so", "is"], "answer": 1, "id": 7},
]  # fmt: skip


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def likelihood(model: Any, ids: Sequence[int], count: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last `count` ids after the last n_positions + 1 of them, and whether greedy."""
    ids = ids[-model.config.n_positions - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, -count:].double()
    targets = list(ids[-count:])
    return torch.log_softmax(logits, -1)[range(count), targets].sum().item(), logits.argmax(-1).tolist() == targets


def of_texts(generator: ortgpt.Generator, model: Any, context: str, continuation: str) -> tuple[float, bool]:
    ids = generator.tokenizer.encode(context + continuation)
    count = len(ids) - len(generator.tokenizer.encode(context))
    return likelihood(model, ids if context else [0, *ids], count)


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def test_a_path_that_is_none(small: ortgpt.Generator) -> None:
    with pytest.raises(ortgpt.OptionError, match=r"^path = 5 \(accepted: a text or a path"):
        evaluate_file(small, 5)  # type: ignore[arg-type]


def test_multiple_choice(small: ortgpt.Generator, small_model: Any, tmp_path: Path) -> None:
    result = evaluate_file(small, write(tmp_path / "rows.jsonl", CHOICES))
    right, right_norm = [], []
    for row, answer in zip(CHOICES, (0, 1, 0, 1), strict=True):
        choices = row["choices"]
        scores = [of_texts(small, small_model, row["context"], f" {choice}")[0] for choice in choices]
        normed = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        right.append(float(scores.index(max(scores)) == answer))
        right_norm.append(float(normed.index(max(normed)) == answer))
    assert right != right_norm  # or this row of tests would not tell them apart
    acc, acc_norm = result.metrics["acc"], result.metrics["acc_norm"]
    assert (acc.value, acc_norm.value) == (statistics.mean(right), statistics.mean(right_norm))
    assert acc.stderr == pytest.approx(standard_error(right))
    assert acc_norm.stderr == pytest.approx(standard_error(right_norm))
    assert acc.baseline == acc_norm.baseline == pytest.approx((1 / 3 + 1 / 2 + 1 / 4 + 1 / 2) / 4)
    assert (result.kind, result.rows, result.cut_rows) == ("multiple-choice", 4, 0)
    encoded = [encode_pair(small, row["context"], f" {choice}") for row in CHOICES for choice in row["choices"]]
    assert result.tokens == sum(len(ids) for _, ids in encoded)


@pytest.mark.parametrize("kind", ["completion", "last-word"])
def test_completion_and_last_word(small: ortgpt.Generator, small_model: Any, tmp_path: Path, kind: str) -> None:
    contexts = ["It is a truth", "that a single man in possession of a good", "some one or", TEXT[:150].rstrip()]
    best = []
    for context in contexts[:2]:  # two targets that greedy decoding gives, which are no words
        ids = small.tokenizer.encode(context)
        with torch.no_grad():
            best.append(small.tokenizer.decode([int(small_model(torch.tensor([ids])).logits[0, -1].argmax())]))
    if kind == "completion":
        targets = [*best, " other", " 日本"]
        rows: list[object] = [{"context": a, "target": b} for a, b in zip(contexts, targets, strict=True)]
        result = evaluate_file(small, write(tmp_path / "rows.jsonl", rows), delimiter="")
    else:
        targets = [" truth", " fortune", " other", " 日本"]
        rows = [{"text": a + b, "context": "unused"} for a, b in zip(contexts, targets, strict=True)]
        result = evaluate_file(small, write(tmp_path / "rows.jsonl", rows), kind=kind)
    want = [of_texts(small, small_model, a, b) for a, b in zip(contexts, targets, strict=True)]
    acc, perplexity = result.metrics["acc"], result.metrics["perplexity"]
    assert acc.value == statistics.mean([float(is_greedy) for _, is_greedy in want])
    assert acc.value > 0 or kind == "last-word"
    assert perplexity.value == pytest.approx(math.exp(-statistics.mean([logprob for logprob, _ in want])), rel=1e-3)
    assert perplexity.stderr == pytest.approx(
        perplexity.value * standard_error([logprob for logprob, _ in want]), rel=1e-3
    )
    counts = [len(encode_pair(small, a, b)[1]) for a, b in zip(contexts, targets, strict=True)]
    assert perplexity.baseline == pytest.approx(300 ** statistics.mean(counts))
    assert acc.baseline == pytest.approx(statistics.mean([300.0**-count for count in counts]))
    assert result.tokens == sum(counts)


def test_perplexity_of_texts_shorter_and_longer_than_the_context(
    small: ortgpt.Generator, small_model: Any, tmp_path: Path
) -> None:
    texts = ["It is\ta  truth\n", TEXT, TEXT * 2, "日"]
    result = evaluate_file(small, write(tmp_path / "rows.jsonl", [{"text": text} for text in texts]))
    logprob, tokens = 0.0, 0
    for text in texts:
        ids = [0, *small.tokenizer.encode(text)]
        tokens += len(ids) - 1
        for begin in range(0, len(ids) - 1, 64):  # the last window begins earlier, so that it is full
            end = min(begin + 64, len(ids) - 1)
            logprob += likelihood(small_model, ids[max(0, end - 64) : end + 1], end - begin)[0]
    assert max(len(small.tokenizer.encode(text)) for text in texts) > 2 * 64
    size, words = len("".join(texts).encode()), sum(len(re.split(r"\s+", text)) for text in texts)
    assert (result.tokens, result.words, result.text_bytes, result.rows) == (tokens, words, size, 4)
    values = {name: metric.value for name, metric in result.metrics.items()}
    assert values == pytest.approx(
        {
            "word_perplexity": math.exp(-logprob / words),
            "byte_perplexity": math.exp(-logprob / size),
            "bits_per_byte": -logprob / size / math.log(2),
        },
        rel=1e-4,
    )
    assert all(metric.stderr is None for metric in result.metrics.values())
    assert result.metrics["bits_per_byte"].baseline == pytest.approx(tokens * math.log2(300) / size)
    assert result.metrics["byte_perplexity"].baseline == pytest.approx(300 ** (tokens / size))


def test_figures_of_numbers_by_hand(small: ortgpt.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [-4.0, -6.0, -3.0, -1.0, -2.0, -4.0, -8.0, -8.5]

    def by_hand(engine: object, pairs: Sequence[object]) -> Iterator[tuple[int, Likelihood]]:
        for index in reversed(range(len(pairs))):
            yield index, Likelihood(numbers[index], index in (1, 2))

    monkeypatch.setattr(evaluate, "likelihoods", by_hand)
    # For each character: -4 and -1; -1 and -1 (the first counts); -2 and -1; -2 and -4.25.
    choices = [["a", "bcdefg"], ["abc", "d"], ["a", "bcde"], ["abcd", "ef"]]
    rows: list[object] = [{"context": "x", "choices": pair, "answer": 0} for pair in choices]
    result = evaluate_file(small, write(tmp_path / "choices.jsonl", rows))
    assert result.metrics["acc"].value == 0.75
    assert result.metrics["acc"].stderr == pytest.approx(0.25)  # sqrt(0.75 * 0.25 * 4 / 3 / 4)
    assert result.metrics["acc_norm"].value == 0.5
    assert result.metrics["acc_norm"].stderr == pytest.approx(math.sqrt(1 / 12))
    rows = [{"context": "x", "target": "y"}] * 4
    result = evaluate_file(small, write(tmp_path / "completions.jsonl", rows))
    assert result.metrics["acc"].value == 0.5
    assert result.metrics["perplexity"].value == pytest.approx(math.exp(3.5))
    assert result.metrics["perplexity"].stderr == pytest.approx(math.exp(3.5) * math.sqrt(13 / 3 / 4))
    numbers[0] = -5000.0
    result = evaluate_file(small, tmp_path / "completions.jsonl", limit=1)
    assert (result.metrics["perplexity"].value, result.metrics["perplexity"].stderr) == (math.inf, None)
    assert (result.metrics["acc"].stderr, result.rows) == (None, 1)


def test_rows_beyond_the_context_lose_their_beginning_and_are_counted(
    small: ortgpt.Generator, small_model: Any, tmp_path: Path
) -> None:
    rows = [{"context": TEXT.rstrip(), "target": "truth"}, {"context": "It is a", "target": "truth"}]
    result = evaluate_file(small, write(tmp_path / "rows.jsonl", rows))
    assert (result.cut_rows, result.rows) == (1, 2)
    logprobs = [of_texts(small, small_model, row["context"], " truth")[0] for row in rows]
    assert result.metrics["perplexity"].value == pytest.approx(math.exp(-sum(logprobs) / 2), rel=1e-3)


def test_a_pair_is_encoded_as_one_text(small: ortgpt.Generator) -> None:
    encode = small.tokenizer.encode
    assert encode_pair(small, "It is ", "a truth") == (encode("It is"), encode(" a truth"))
    assert encode_pair(small, "It is \n", "a") == (encode("It is"), encode("It is \na")[len(encode("It is")) :])
    assert encode_pair(small, "", " a") == ([0], encode(" a"))
    assert encode_pair(small, "  ", "a") == ([0], encode("  a"))
    context, ids = encode_pair(small, "a si", "ngle")
    assert (context, ids) == (encode("a si"), encode("a single")[len(encode("a si")) :])
    assert ids != encode("ngle")  # the tokens of "single" do not end where the context does
    with pytest.raises(PromptError, match="adds no token"):
        encode_pair(small, "It", "")


def test_a_text_that_begins_with_the_start_token_is_not_given_it_twice(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    letter = json.loads((checkpoint / "vocab.json").read_text())["a"]
    (checkpoint / "config.json").write_text(json.dumps(config | {"bos_token_id": letter}))
    with ortgpt.load(export_bundle(checkpoint, tmp_path / "bundle").path) as generator:
        assert generator.start_id == letter
        assert encode_pair(generator, "", "a truth") == ([letter], generator.tokenizer.encode("a truth")[1:])


@pytest.mark.parametrize("family", ["openai-gpt", "gpt2"])
def test_a_model_without_a_start_token_needs_contexts(tmp_path: Path, family: str) -> None:
    none: dict[str, Any] = {} if family == "openai-gpt" else {"bos_token_id": None, "eos_token_id": None}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family=family, **none)
    rows = write(tmp_path / "rows.jsonl", CHOICES)
    with ortgpt.load(export_bundle(checkpoint, tmp_path / "bundle").path) as generator:
        with pytest.raises(PromptError, match=r"rows.jsonl line 3: the model has no token to start a text from"):
            evaluate_file(generator, rows)
        assert evaluate_file(generator, rows, limit=2).rows == 2
        with pytest.raises(PromptError, match=r"line 1: the model has no token to start"):
            evaluate_file(generator, write(tmp_path / "texts.jsonl", [{"text": "a"}]))


def test_what_cannot_be_evaluated(small: ortgpt.Generator, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"context": "a", "target": TEXT}, {"context": "a", "target": "b"}] * 2)
    with pytest.raises(PromptError) as refused:
        evaluate_file(small, rows)
    first, *lines = str(refused.value).splitlines()
    assert first == f"{rows}: 2 of 4 rows are at fault"
    assert [line.partition(" of ")[0] for line in lines] == ["line 1: a continuation", "line 3: a continuation"]
    assert "(accepted: at most the context of 64 tokens)" in lines[0]
    with pytest.raises(FileNotFoundError):
        evaluate_file(small, tmp_path / "missing.jsonl")
    (tmp_path / "utf16.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(PromptError, match="UTF-16"):
        evaluate_file(small, tmp_path / "utf16.jsonl")
    with pytest.raises(OptionError, match="limit = 0"):
        evaluate_file(small, rows, limit=0)


def test_a_bundle_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    bundle = export_bundle(CheckpointSource(checkpoint, tokenizer="none"), tmp_path / "bundle").path
    with ortgpt.load(bundle) as generator, pytest.raises(BundleError, match="has no tokenizer"):
        evaluate_file(generator, write(tmp_path / "rows.jsonl", CHOICES))


def test_progress_counts_all_continuations(small: ortgpt.Generator, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = write(tmp_path / "rows.jsonl", CHOICES)
    evaluate_file(small, path, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 11) for done in range(1, 12)]
