"""Evaluate a model on a file: multiple choice, completions, last words, perplexity.

Encoding, windows and figures are those of lm-evaluation-harness 0.4.13 (lm_eval/api/model.py, task.py, metrics.py), so
that they can be compared.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.files import decode_text
from ortgpt.decode.scoring import Likelihood, Pair, cut_pair, likelihoods, rolling_pairs
from ortgpt.errors import BundleError, ContextLengthError, OptionError, PromptError
from ortgpt.generator import Generator
from ortgpt.results import Evaluation, Metric, exp
from ortgpt.tools.evaluation_rows import MULTIPLE_CHOICE, PERPLEXITY, Row, Rows, read_rows, refuse

Floats = npt.NDArray[np.float64]


def evaluate_file(
    generator: Generator,
    path: str | os.PathLike[str],
    *,
    kind: str | None = None,
    delimiter: str | None = None,
    limit: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Evaluate a model on a UTF-8 file of JSON lines.

    The keys of the first row say the kind, unless `kind` does: "multiple-choice" ("context", "choices" and "answer", an
    index or the text of a choice), "completion" ("context" and "target"), "perplexity" ("text") or "last-word" ("text",
    of which the last word is the target). `delimiter` stands between a context and what follows, by default a space.
    `limit` takes the first rows only. `on_progress` is called with the number of continuations that were computed, and
    of all. Raises OptionError, OSError, PromptError that names each line at fault, before anything is computed, and
    BundleError for a bundle without a tokenizer.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError.bad_value("path", path, "a text or a path of the file system")
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = decode_text(data, os.fspath(path))
    except ValueError as error:
        raise PromptError(str(error)) from None
    rows = read_rows(text, os.fspath(path), kind=kind, delimiter=delimiter, limit=limit)
    return evaluate_rows(generator, rows, os.fspath(path), on_progress)


def evaluate_rows(
    generator: Generator, rows: Rows, source: str, on_progress: Callable[[int, int], None] | None = None
) -> Evaluation:
    """Evaluate a model on rows that were read from `source`, as evaluate_file() describes."""
    if not generator.has_text:
        raise BundleError(f"{generator.bundle.path} has no tokenizer, which an evaluation needs to encode texts")
    encoded, cut_rows = _encode_all(generator, rows, source)
    results = _compute(generator, encoded, on_progress)
    tokens = [sum(len(continuation) for _, continuation in pairs) for pairs in encoded]
    log_vocab = math.log(generator.engine.allowed_vocab_size)
    words = text_bytes = None
    if rows.kind == MULTIPLE_CHOICE:
        metrics = _choice_metrics(rows.rows, results)
    elif rows.kind == PERPLEXITY:
        texts = [row.choices[0] for row in rows.rows]
        words = sum(len(re.split(r"\s+", text)) for text in texts)
        text_bytes = sum(len(text.encode()) for text in texts)
        nll = -sum(result.logprob for row in results for result in row)
        metrics = _perplexity_metrics(nll, sum(tokens) * log_vocab, words, text_bytes)
    else:
        metrics = _completion_metrics([result for (result,) in results], np.array(tokens) * log_vocab)
    return Evaluation(
        kind=rows.kind,
        metrics=metrics,
        rows=len(rows.rows),
        tokens=sum(tokens),
        cut_rows=cut_rows,
        words=words,
        text_bytes=text_bytes,
    )


def encode_pair(generator: Generator, context: str, continuation: str) -> Pair:
    """Return the ids of a context and of what continues it, at least one each.

    White space at the end of the context moves to the continuation, and both are encoded as one text, so that a word
    begins with its space. An empty context is the token that precedes all text. Raises PromptError.
    """
    encode = generator.tokenizer.encode
    before = context.rstrip()
    continuation = context[len(before) :] + continuation
    ids = encode(before + continuation)
    if before:
        context_ids = encode(before)
        ids = ids[len(context_ids) :]
    else:
        context_ids = [generator.start_id]
        if ids[:1] == context_ids:
            ids = ids[1:]
    if not ids:
        raise PromptError("what follows the context adds no token to it")
    return context_ids, ids


def _encode_all(generator: Generator, rows: Rows, source: str) -> tuple[list[list[Pair]], int]:
    """Return the pairs of each row, and how many rows lost the beginning of their context. Raises PromptError."""
    encoded: list[list[Pair]] = []
    faults = []
    cut_rows = 0
    for row in rows.rows:
        try:
            if rows.kind == PERPLEXITY:
                encoded.append(_rolling(generator, row.choices[0]))
            else:
                whole = [encode_pair(generator, row.context, each) for each in row.continuations]
                encoded.append([cut_pair(*pair, generator.engine.config.n_positions) for pair in whole])
                pairs = zip(whole, encoded[-1], strict=True)
                cut_rows += any(len(context) > len(kept) for (context, _), (kept, _) in pairs)
        except (PromptError, ContextLengthError) as error:
            faults.append((row.line, str(error)))
    refuse(source, faults, len(rows.rows))
    return encoded, cut_rows


def _rolling(generator: Generator, text: str) -> list[Pair]:
    ids = generator.tokenizer.encode(text)
    if not ids:
        raise PromptError("the text has no tokens")
    return rolling_pairs(generator.start_id, ids, generator.engine.config.n_positions)


def _compute(
    generator: Generator, encoded: Sequence[Sequence[Pair]], on_progress: Callable[[int, int], None] | None
) -> list[list[Likelihood]]:
    """Return the likelihoods of each row's pairs."""
    flat = [pair for pairs in encoded for pair in pairs]
    found: dict[int, Likelihood] = {}
    for index, likelihood in likelihoods(generator.engine, flat):
        found[index] = likelihood
        if on_progress is not None:
            on_progress(len(found), len(flat))
    ends = np.cumsum([len(pairs) for pairs in encoded])
    return [[found[index] for index in range(end - len(pairs), end)] for end, pairs in zip(ends, encoded, strict=True)]


def _choice_metrics(rows: Sequence[Row], results: Sequence[Sequence[Likelihood]]) -> dict[str, Metric]:
    """Return how often the likeliest choice is right, also by its log-likelihood for each of its characters."""
    right, right_norm = [], []
    for row, likelihoods_of_row in zip(rows, results, strict=True):
        logprobs = np.array([each.logprob for each in likelihoods_of_row])
        lengths = [len(choice) for choice in row.choices]
        right.append(int(logprobs.argmax()) == row.answer)
        right_norm.append(int((logprobs / lengths).argmax()) == row.answer)
    chance = float(np.mean([1 / len(row.choices) for row in rows]))
    return {
        "acc": _mean(np.array(right, np.float64), chance),
        "acc_norm": _mean(np.array(right_norm, np.float64), chance),
    }


def _completion_metrics(results: Sequence[Likelihood], uniform_nll: Floats) -> dict[str, Metric]:
    """Return how often greedy decoding gives the target, and exp of the mean negative log-likelihood of a target."""
    accuracy = np.array([result.is_greedy for result in results], np.float64)
    nll = _mean(np.array([-result.logprob for result in results]), float(uniform_nll.mean()))
    perplexity = exp(nll.value)
    return {
        "acc": _mean(accuracy, float(np.exp(-uniform_nll).mean())),
        "perplexity": Metric(
            value=perplexity,
            # By the delta method, d exp(x) = exp(x) dx. The harness draws samples instead (bootstrap).
            stderr=None if nll.stderr is None else perplexity * nll.stderr,
            baseline=exp(nll.baseline),
        ),
    }


def _perplexity_metrics(nll: float, uniform_nll: float, words: int, text_bytes: int) -> dict[str, Metric]:
    """Return figures of all texts together; they have no standard error."""

    def metric(figure: Callable[[float], float]) -> Metric:
        return Metric(value=figure(nll), stderr=None, baseline=figure(uniform_nll))

    return {
        "word_perplexity": metric(lambda total: exp(total / words)),
        "byte_perplexity": metric(lambda total: exp(total / text_bytes)),
        "bits_per_byte": metric(lambda total: total / text_bytes / math.log(2)),
    }


def _mean(values: Floats, baseline: float) -> Metric:
    """Return a mean with its standard error: the sample's standard deviation over the root of its size."""
    stderr = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Metric(value=float(values.mean()), stderr=stderr, baseline=baseline)
