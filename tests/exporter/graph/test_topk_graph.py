"""The top-k graph against the runtime's own sampling on all logits, by value; a GPU runs the same graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt.engine.device_topk import DeviceTopK
from ortgpt.engine.engine import Engine
from ortgpt.generator import Generator
from ortgpt_exporter import export_bundle
from support import write_checkpoint


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    """A bundle for a GPU on the CPU, its vocabulary padded by 20 rows."""
    folder = tmp_path_factory.mktemp("select")
    checkpoint = write_checkpoint(folder / "checkpoint", vocab_size=320)
    with ortgpt.load(export_bundle(checkpoint, folder / "out", target="cuda").path, device="cpu") as generator:
        yield generator


def topk_of(generator: Generator) -> DeviceTopK:
    assert generator.engine.device_topk is not None
    return generator.engine.device_topk


def test_the_largest_logits_of_each_row(generator: Generator) -> None:
    device_topk = topk_of(generator)
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(3, 1, 320)) * 4 - 2).astype(np.float32)
    seen = [rng.permutation(300)[:size] for size in (0, 5, 130)]
    penalties = [1.0, 1.3, 0.7]
    top, ids, non_finite = device_topk.new_forward(3).run(device_topk.session.share(logits), seen, penalties)
    assert top.shape == ids.shape == (3, 64)
    for row in range(3):
        scores = logits[row, 0, :300].copy()
        scores[seen[row]] *= np.where(scores[seen[row]] < 0, penalties[row], 1 / penalties[row])
        order = np.argsort(-scores)[:64]
        assert np.array_equal(ids[row], order)
        assert np.allclose(top[row], scores[order], rtol=1e-6)
    assert not non_finite.any()


def test_of_equals_the_lowest_id_comes_first_and_a_forward_serves_many_steps(generator: Generator) -> None:
    device_topk = topk_of(generator)
    forward = device_topk.new_forward(1)
    logits = np.zeros((1, 1, 320), np.float32)
    logits[0, 0, [7, 200, 100]] = 3.0
    for seen, want in (([], [7, 100, 200, 0, 1]), ([7], [100, 200, 7, 0, 1]), ([100] * 70, [7, 200, 100, 0, 1])):
        _, ids, _ = forward.run(device_topk.session.share(logits), [np.array(seen, np.int64)], [2.0])
        assert ids[0, :5].tolist() == want


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_reported(generator: Generator, value: float) -> None:
    device_topk = topk_of(generator)
    logits = np.zeros((3, 1, 320), np.float32)
    logits[1, 0, 310] = value  # even where no token is
    none = np.zeros(0, np.int64)
    *_, non_finite = device_topk.new_forward(3).run(device_topk.session.share(logits), [none] * 3, [1.0] * 3)
    assert np.isnan(non_finite).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.4, "min_new_tokens": 9},
        {"seed": 4, "temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2},
        {"top_k": 0, "seed": 4, "temperature": 3.0},
        {"top_k": 65, "seed": 4},
        {"top_k": 64, "seed": 4, "temperature": 2.0},
    ],
)
def test_ids_are_those_picked_from_all_logits(generator: Generator, options: dict[str, Any]) -> None:
    engine = generator.engine
    whole = Engine(engine.session, engine.config, masked_tokens=20)
    plain = Generator(generator.bundle, whole, generator.tokenizer)
    prompts = ["It is", "a truth universally acknowledged", "x"]
    found, want = (g.generate_batch(prompts, max_new_tokens=20, **options) for g in (generator, plain))
    assert [row.token_ids for row in found] == [row.token_ids for row in want]
    assert len({tuple(row.token_ids) for row in found}) == 3
