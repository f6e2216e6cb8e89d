"""How much a quantised graph differs from the float32 graph it was made of: predictions, independence, speed.

Both are run as the runtime runs them, on the same token ids. Knows no recipe and writes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ortgpt.engine import Engine
from ortgpt.options import GenerationOptions
from ortgpt.picker import Picker
from ortgpt.rows import Row
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.verify import Logits, rounded

SAMPLED_TOKENS = 2048
_ROWS, _ROW_TOKENS = 16, 128
_PIECE = 64  # positions whose logits are held at once
_TOP = 5
_INDEPENDENCE_ROWS, _INDEPENDENCE_TOKENS = 8, 128
_STRANGE_TOKENS = 64
_SPEED_PROMPT, _SPEED_STEPS, _SPEED_RUNS = 128, 32, 5

Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Two graphs' predictions of the same `tokens`: nll in nats, summed; mean divergence; agreement as fractions.

    `kl` is KL(float32 ‖ quantised) in nats; `top5` the part of the five best of the one that are among those of the
    other.
    """

    tokens: int
    nll: float
    baseline_nll: float
    kl: float
    top1: float
    top5: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.tokens))

    @property
    def baseline_perplexity(self) -> float:
        return float(np.exp(self.baseline_nll / self.tokens))

    @property
    def perplexity_ratio(self) -> float:
        return float(np.exp((self.nll - self.baseline_nll) / self.tokens))


@dataclass(frozen=True, kw_only=True)
class Independence:
    """How far logits move when the same token is computed otherwise, and how many winners change per 1,000 tokens."""

    logit_bound: float
    batch_flips: float
    outlier_flips: float
    piece_flips: float
    step_flips: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second: of a prefill, and of decoding after it."""

    prefill: float
    decode: float


def sample_rows(engine: Engine, start_id: int) -> list[Ids]:
    """Return texts drawn from the model itself, SAMPLED_TOKENS in all or what its context allows, as token ids."""
    length = min(_ROW_TOKENS, engine.config.n_positions - 1)
    options = GenerationOptions(temperature=1.0, top_k=0, max_new_tokens=length, eos_token_id=[])
    resolved = options.resolve(GenerationOptions())
    rows = [
        Row(
            prompt_ids=[start_id],
            max_new_tokens=length,
            eos_token_ids=frozenset(),
            pick=Picker(resolved, [start_id], seed),
        )
        for seed in range(_ROWS)
    ]
    for _ in engine.generate(rows):
        pass
    return [[start_id, *row.token_ids] for row in rows]


def split_rows(token_ids: Sequence[int], start_id: int, n_positions: int) -> list[Ids]:
    """Cut a text into rows that fit the context, each behind `start_id`."""
    room = n_positions - 1
    return [[start_id, *token_ids[begin : begin + room]] for begin in range(0, len(token_ids), room)]


def compare(
    baseline: Engine, candidate: Engine, rows: Sequence[Ids], *, on_row: Callable[[], None] = lambda: None
) -> Likeness:
    """Let both predict every id of `rows` but the first of each."""
    sums = np.zeros(5)
    for ids in rows:
        for expected, found, targets in _predictions(baseline, candidate, ids):
            if not np.isfinite(expected).all():
                raise ExportError("the float32 bundle computes NaN or infinity; its weights are damaged or too large")
            sums += _differences(_log_softmax(expected), _log_softmax(found), targets)
        on_row()
    tokens = sum(len(ids) - 1 for ids in rows)
    baseline_nll, nll, kl, top1, top5 = sums.tolist()
    return Likeness(
        tokens=tokens, nll=nll, baseline_nll=baseline_nll, kl=kl / tokens, top1=top1 / tokens, top5=top5 / tokens
    )


def _predictions(
    baseline: Engine, candidate: Engine, ids: Ids
) -> Iterator[tuple[Logits, Logits, npt.NDArray[np.int64]]]:
    caches = [engine.new_cache(1, len(ids)) for engine in (baseline, candidate)]
    for begin in range(0, len(ids) - 1, _PIECE):
        piece = ids[begin : min(begin + _PIECE, len(ids) - 1)]
        places = np.arange(len(piece))[None]
        expected, found = (
            engine.prefill(cache, [piece], places)[0][:, : engine.allowed_vocab_size]
            for engine, cache in zip((baseline, candidate), caches, strict=True)
        )
        yield expected, found, np.array(ids[begin + 1 : begin + 1 + len(piece)])


def _differences(expected: Logits, found: Logits, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    rows = np.arange(len(targets))
    best, other = (np.argpartition(values, -_TOP, axis=1)[:, -_TOP:] for values in (expected, found))
    shared = (best[:, :, None] == other[:, None, :]).any(2).mean(1)
    return np.array(
        [
            -expected[rows, targets].sum(dtype=np.float64),
            -found[rows, targets].sum(dtype=np.float64),
            (np.exp(expected) * (expected - found)).sum(dtype=np.float64),
            (expected.argmax(1) == found.argmax(1)).sum(),
            shared.sum(),
        ]
    )


def _log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Logits = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def measure_independence(engine: Engine, rows: Sequence[Ids]) -> Independence:
    """Compute the same tokens alone, one a step, and otherwise, and compare.

    Otherwise is in a batch, beside a row of outliers, in a whole prefill, and four a step.
    """
    cut = [list(ids[: _INDEPENDENCE_TOKENS + 1]) for ids in rows[:_INDEPENDENCE_ROWS]]
    length = min(map(len, cut))
    texts = [ids[:length] for ids in cut]
    outliers = [_strangest_id(engine)] * length
    places = np.arange(length)[None]
    alone = np.stack([_stepwise(engine, [ids], 1)[0] for ids in texts])
    moved = 0.0

    def flips(other: Logits) -> float:
        nonlocal moved
        moved = max(moved, float(np.abs(other - alone).max()))
        return rounded(float(1000 * (other.argmax(-1) != alone.argmax(-1)).mean()))

    found = {
        "batch_flips": flips(_stepwise(engine, texts, 1)),
        "outlier_flips": flips(np.stack([_stepwise(engine, [ids, outliers], 1)[0] for ids in texts])),
        "piece_flips": flips(
            np.stack([engine.prefill(engine.new_cache(1, length), [ids], places)[0] for ids in texts])
        ),
        "step_flips": flips(np.stack([_stepwise(engine, [ids], 4)[0] for ids in texts])),
    }
    return Independence(logit_bound=rounded(moved), **found)


def _strangest_id(engine: Engine) -> int:
    """Return, of tokens spread over the vocabulary, the one whose logits are largest: it drives activations far."""
    count = min(_STRANGE_TOKENS, engine.allowed_vocab_size)
    ids = [index * engine.allowed_vocab_size // count for index in range(count)]
    logits = np.concatenate([engine.prefill(engine.new_cache(1, 1), [[token_id]])[:, 0] for token_id in ids])
    return ids[int(np.abs(logits).max(axis=1).argmax())]


def _stepwise(engine: Engine, texts: Sequence[Ids], width: int) -> Logits:
    """Return the logits (rows, positions, vocab_size) of texts of one length, fed `width` tokens a step."""
    length = len(texts[0])
    cache = engine.new_cache(len(texts), length)
    found = []
    for begin in range(0, length, width):
        pieces = [ids[begin : begin + width] for ids in texts]
        places = np.tile(np.arange(len(pieces[0])), (len(texts), 1))
        found.append(engine.prefill(cache, pieces, places).copy())
    result: Logits = np.concatenate(found, axis=1)
    return result


def measure_speed(engines: Sequence[Engine]) -> list[Speed]:
    """Time prefill and decoding of each in turn, several times, and return the medians."""
    config = engines[0].config
    prompt = [index % engines[0].allowed_vocab_size for index in range(min(_SPEED_PROMPT, config.n_positions // 2))]
    steps = min(_SPEED_STEPS, config.n_positions - len(prompt))
    times: list[list[tuple[float, float]]] = [[] for _ in engines]
    for _ in range(_SPEED_RUNS + 1):
        for engine, rows in zip(engines, times, strict=True):
            rows.append(_timed(engine, prompt, steps))
    medians = [[statistics.median(row[place] for row in rows[1:]) for place in (0, 1)] for rows in times]
    return [Speed(prefill=rounded(len(prompt) / first), decode=rounded(steps / rest)) for first, rest in medians]


def _timed(engine: Engine, prompt: Ids, steps: int) -> tuple[float, float]:
    cache = engine.new_cache(1, len(prompt) + steps)
    started = time.perf_counter()
    engine.prefill(cache, [prompt])
    between = time.perf_counter()
    call = engine.new_call(cache)
    for _ in range(steps):
        call.run(cache.lengths + 1)
        call.logits()
    return between - started, time.perf_counter() - between
