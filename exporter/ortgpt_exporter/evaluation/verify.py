"""Compare an opened graph with the PyTorch network it came from, the way the runtime will use it. Writes nothing.

The reference is always PyTorch's full computation of one row alone, without cache, padding or batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ortgpt.bundle.manifest import Check
from ortgpt.contract import DType, Flavour
from ortgpt.decode.next_token import check_finite
from ortgpt.engine.device_topk import DeviceTopK
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Logits
from ortgpt.errors import NonFiniteLogitsError
from ortgpt.sampling.processors import penalize_repetition
from ortgpt_exporter.errors import ExportError
from ortgpt_models import GPT

# The largest accepted difference of logits, relative to the largest logit or 1, by the graph's activation type.
TOLERANCES = {DType.FLOAT32: 1e-4, DType.FLOAT16: 2e-2}
_DECODE_STEPS = 6
_MAX_POSITIONS = 64  # of one prefill, spread from its first to its last
SEED = 20190214


def check_count(n_positions: int, flavour: str) -> int:
    """Return how many checks verify() runs on a graph of a network with this context."""
    return len(prefill_lengths(n_positions)) + 3 + (flavour == Flavour.NATIVE)


def verify(engine: Engine, gpt: GPT, *, on_check: Callable[[str], None] = lambda name: None) -> tuple[Check, ...]:
    """Run every check; `on_check` gets the name of each before it runs.

    The checks are prefills of 1, 2 and 17 tokens and of the full context (there at 64 positions); a prefill in pieces;
    cached single steps; a ragged batch, its prefill and its steps; and its hidden states, if the graph has them.
    Lengths beyond the context are cut to it. Raises ExportError if the network itself computes NaN or infinity.
    """
    n_positions = gpt.config.n_positions
    random = np.random.default_rng(SEED)
    vocab_size = min(gpt.config.vocab_size, engine.allowed_vocab_size)

    def text(length: int) -> list[int]:
        return [int(token_id) for token_id in random.integers(vocab_size, size=length)]

    steps = min(_DECODE_STEPS, n_positions - 1)
    longest = max(1, n_positions - steps)
    prompt = text(min(17, longest))
    ragged = [prompt, prompt[:1], text(min(7, longest))]
    # Generators: each plan runs when its turn comes.
    plans: list[tuple[str, Iterator[tuple[Logits, Logits]]]] = [
        *((f"prefill of {length}", _prefill(engine, gpt, text(length))) for length in prefill_lengths(n_positions)),
        ("prefill in pieces", _pieces(engine, gpt, prompt)),
        (f"{steps} cached steps", _steps(engine, gpt, [prompt], text(steps))),
        (f"ragged batch and {steps} steps", _steps(engine, gpt, ragged, text(steps))),
    ]
    if engine.has_hidden_states:
        plans.append(("hidden states of a ragged batch", _hidden_states(engine, gpt, ragged)))
    checks = []
    for name, plan in plans:
        on_check(name)
        checks.append(compare_logits(name, plan, TOLERANCES[engine.session.cache.dtype]))
    return tuple(checks)


def verify_device_topk(device_topk: DeviceTopK, vocab_size: int) -> None:
    """Compare a top-k graph with numpy on random logits. Raises ExportError if they differ."""
    random = np.random.default_rng(SEED)
    logits = random.normal(size=(3, 1, vocab_size)).astype(np.float32)
    allowed = device_topk.allowed_vocab_size
    visible_ids = [random.permutation(allowed)[: allowed // part] for part in (2, 3, 4)]
    top, ids, non_finite = device_topk.new_forward(3).run(device_topk.session.share(logits), visible_ids, [1.3] * 3)
    for row, penalized in enumerate(visible_ids):
        scores = logits[row, 0, :allowed].copy()
        penalize_repetition(scores, penalized, 1.3)
        order = np.argsort(-scores, kind="stable")[: ids.shape[1]]
        if non_finite[row] or not (np.array_equal(ids[row], order) and np.array_equal(top[row], scores[order])):
            raise ExportError("the top-k graph does not pick the largest logits after the repetition penalty")


def prefill_lengths(n_positions: int) -> list[int]:
    """Return the lengths of the texts to compare."""
    return sorted({min(length, n_positions) for length in (1, 2, 17, n_positions)})


def compare_logits(name: str, pairs: Iterator[tuple[Logits, Logits]], relative_tolerance: float) -> Check:
    """Sum up pairs of PyTorch's and the graph's results, (positions, logits or n_embd) each, in one check."""
    diffs, largest, margins, same_argmax = [], [], [], []
    for expected, logits in pairs:
        diffs.append(np.abs(expected - logits).max(axis=1))
        largest.append(np.abs(expected).max(axis=1))
        top = np.partition(expected, -min(2, expected.shape[1]), axis=1)[:, -2:]
        margins.append(top[:, -1] - top[:, 0])  # 0 if there is one logit
        same_argmax.append(expected.argmax(axis=1) == logits.argmax(axis=1))
    max_abs_diff, max_abs_logit = float(np.concatenate(diffs).max()), float(np.concatenate(largest).max())
    certain = np.concatenate(margins) > 2 * max_abs_diff
    return Check(
        name=name,
        positions=len(certain),
        max_abs_diff=rounded(max_abs_diff),
        max_abs_logit=rounded(max_abs_logit),
        tolerance=rounded(relative_tolerance * max(1.0, max_abs_logit)),
        argmax_compared=int(certain.sum()),
        argmax_differing=int((certain & ~np.concatenate(same_argmax)).sum()),
    )


def rounded(value: float) -> float:
    """Return six significant digits, which JSON keeps exactly."""
    return float(f"{value:.6g}")


def require_finite(logits: Logits, source: str) -> None:
    """Raise ExportError, which names the source of the logits, if one of them is NaN or infinite."""
    try:
        check_finite(logits, f"in {source}")
    except NonFiniteLogitsError as error:
        raise ExportError(str(error)) from None


def _prefill(engine: Engine, gpt: GPT, ids: list[int]) -> Iterator[tuple[Logits, Logits]]:
    positions = np.unique(np.linspace(0, len(ids) - 1, _MAX_POSITIONS).astype(np.int64))
    yield _oracle(gpt, ids, positions), engine.prefill(engine.new_cache(1, len(ids)), [ids], positions[None])[0]


def _pieces(engine: Engine, gpt: GPT, ids: list[int]) -> Iterator[tuple[Logits, Logits]]:
    cache = engine.new_cache(1, len(ids))
    cuts = sorted({0, len(ids) // 3, len(ids) // 2, len(ids)})
    for start, end in itertools.pairwise(cuts):
        positions = np.arange(end - start)
        yield _oracle(gpt, ids, positions + start), engine.prefill(cache, [ids[start:end]], positions[None])[0]


def _steps(
    engine: Engine, gpt: GPT, prompts: Sequence[list[int]], continuation: list[int]
) -> Iterator[tuple[Logits, Logits]]:
    """Prefill a batch, then feed every row the same continuation, one token per step."""
    cache = engine.new_cache(len(prompts), max(len(ids) for ids in prompts) + len(continuation))
    rows = [[*ids, *continuation] for ids in prompts]
    expected = [_oracle(gpt, row, np.arange(len(ids) - 1, len(row))) for ids, row in zip(prompts, rows, strict=True)]
    yield np.stack([logits[0] for logits in expected]), engine.prefill(cache, prompts)[:, 0]
    forward = engine.new_forward(cache)
    for step, token_id in enumerate(continuation):
        forward.input_ids[:, 0] = token_id
        forward.run(cache.lengths + 1)
        yield np.stack([logits[step + 1] for logits in expected]), forward.logits()[:, 0]


@torch.no_grad()
def _hidden_states(engine: Engine, gpt: GPT, prompts: Sequence[list[int]]) -> Iterator[tuple[Logits, Logits]]:
    positions = np.array([np.arange(max(map(len, prompts))).clip(max=len(ids) - 1) for ids in prompts])
    for ids, hidden in zip(prompts, engine.hidden_states(prompts, positions), strict=True):
        yield gpt.hidden(torch.tensor([ids]))[0].numpy(), hidden[: len(ids)]


@torch.no_grad()
def _oracle(gpt: GPT, ids: Sequence[int], positions: npt.NDArray[np.int64]) -> Logits:
    """Return PyTorch's logits (positions, vocab_size) of one row, computed without a cache."""
    logits: Logits = gpt(torch.tensor([ids]), logit_positions=torch.from_numpy(positions)[None])[0].numpy()
    require_finite(logits, "the network itself")
    return logits
