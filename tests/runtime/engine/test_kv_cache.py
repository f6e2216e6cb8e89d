"""Rows of a cache that are moved, kept and put back, against numpy; in the CPU's memory, as on a GPU, and growing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt.engine.kv_cache import Cache, FixedCache

KINDS = ["fixed", "device", "growing"]
LENGTHS = [5, 1, 9, 3]


def filled(small: ortgpt.Generator, small_portable: ortgpt.Generator, kind: str) -> tuple[Cache, list[list[Any]]]:
    """Return a cache of four rows, and what each of them holds."""
    engine = (small_portable if kind == "growing" else small).engine
    cache = engine.new_cache(4, 20, max_batch_size=6)
    if kind == "device":
        assert isinstance(cache, FixedCache)
        shape = (4, *cache.buffers[0].shape[1:])
        values = [engine.session.empty(shape, "float32") for _ in cache.values]
        cache = FixedCache(engine.session, cache.capacity, values, [], np.zeros(4, np.int32))
    rng = np.random.default_rng(0)
    head_dim = engine.session.cache.head_dim
    held = [[rng.normal(size=(4, length, head_dim)).astype(np.float32) for _ in range(4)] for length in LENGTHS]
    cache.load_rows(held)
    return cache, held


def check(cache: Cache, held: list[list[Any]]) -> None:
    assert cache.lengths.tolist() == [parts[0].shape[1] for parts in held]
    for row, parts in enumerate(held):
        for found, want in zip(cache.read_row(row), parts, strict=True):
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sources", [[0, 1, 2, 3], [3, 0, 1, 2], [1, 1, 1, 1], [2, 3], [3], [0, 1, 2, 3, 0, 2], [1, 0]])
def test_rows_are_arranged(
    small: ortgpt.Generator, small_portable: ortgpt.Generator, kind: str, sources: list[int]
) -> None:
    cache, held = filled(small, small_portable, kind)
    cache.reorder(sources)
    check(cache, [held[source] for source in sources])
    cache.reorder([0])
    check(cache, [held[sources[0]]])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_read_and_put_back_are_the_same(
    small: ortgpt.Generator, small_portable: ortgpt.Generator, kind: str
) -> None:
    cache, held = filled(small, small_portable, kind)
    cache.reorder([2])
    for tokens in (9, 4, 1, 0):
        cache.crop(tokens)
        check(cache, [[part[:, :tokens] for part in held[2]]])


def test_what_is_arranged_goes_on_as_it_would(small: ortgpt.Generator, small_portable: ortgpt.Generator) -> None:
    """A step on moved rows gives the logits that the rows give where they were."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
    for generator in (small, small_portable):
        engine = generator.engine
        logits: dict[int, Any] = {}
        for sources in ([0, 1, 2, 3], [2, 0, 0, 3], [3, 1], [2]):
            cache = engine.new_cache(4, 10)
            engine.prefill(cache, prompts)
            cache.reorder(sources)
            call = engine.new_forward(cache)
            call.input_ids[...] = 20
            call.run(cache.lengths + 1)
            for row, source in enumerate(sources):
                logits.setdefault(source, call.logits()[row, 0].copy())
                np.testing.assert_allclose(call.logits()[row, 0], logits[source], atol=1e-5)
