"""Batches: rows by themselves whatever the others do, options and seeds of their own, budgets, several sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt import GenerationOptions, OptionError
from ortgpt.decode.generate import generate
from ortgpt.decode.row import Row
from ortgpt.request import prepare
from ortgpt.sampling.sampler import Sampler

PROMPTS = ["It is a truth", "", "a single man", "universally acknowledged, that", "Café — 日本", "wife"]


@pytest.fixture(params=["native", "portable"])
def generator(
    request: pytest.FixtureRequest, small: ortgpt.Generator, small_portable: ortgpt.Generator
) -> ortgpt.Generator:
    return {"native": small, "portable": small_portable}[request.param]


def ids_of(completions: list[ortgpt.Completion]) -> list[list[int]]:
    return [each.token_ids for each in completions]


def test_rows_have_options_and_seeds_of_their_own(generator: ortgpt.Generator) -> None:
    options = [
        GenerationOptions(max_new_tokens=3), GenerationOptions(temperature=0.9, seed=4), GenerationOptions(stop="e"),
        GenerationOptions(top_k=3, seed=5, max_new_tokens=30), GenerationOptions(repetition_penalty=1.5),
        GenerationOptions(min_p=0.2, seed=6, no_repeat_ngram_size=2),
    ]  # fmt: skip
    together = generator.generate_batch(PROMPTS, options, eos_token_id=[])
    for prompt, each, row in zip(PROMPTS, options, together, strict=True):
        alone = generator.generate(prompt, each, eos_token_id=[])
        assert (row.token_ids, row.text, row.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
    with pytest.raises(OptionError, match="a list with one for each of the 6 prompts"):
        generator.generate_batch(PROMPTS, options[:2])
    with pytest.raises(OptionError, match="seed has 2 values for 1 rows"):
        generator.generate_batch(["a"], [GenerationOptions(seed=[1, 2])])


def test_rows_that_end_leave_the_batch(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that go on are computed alone, and are the same."""
    sizes: list[int] = []
    new_forward = small.engine.new_forward

    def noted(cache: Any, **shape: Any) -> Any:
        sizes.append(cache.batch_size)
        return new_forward(cache, **shape)

    monkeypatch.setattr(small.engine, "new_forward", noted)
    lengths = [2, 30, 9, 17, 9, 25]
    options = [GenerationOptions(max_new_tokens=length) for length in lengths]
    together = small.generate_batch(PROMPTS, options, eos_token_id=[])
    assert sizes == [6, 6, 5, 3, 2, 1]  # the prompts, then the steps
    for prompt, length, row in zip(PROMPTS, lengths, together, strict=True):
        assert row.token_ids == small.generate(prompt, max_new_tokens=length, eos_token_id=[]).token_ids
        assert len(row.token_ids) == length


def test_return_sequences_share_one_prefill_and_have_seeds_of_their_own(
    generator: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []
    prefill_forward = generator.engine.prefill_forward

    def noted(cache: Any, prompts: Any, *rest: Any) -> Any:
        first.append(len(prompts))
        return prefill_forward(cache, prompts, *rest)

    monkeypatch.setattr(generator.engine, "prefill_forward", noted)
    found = generator.generate_batch(PROMPTS[:2], num_return_sequences=3, seed=7, max_new_tokens=15)
    assert first == [2]
    assert len(found) == 6
    assert len({tuple(ids) for ids in ids_of(found)}) == 6
    # The first sequence is what the seed gives alone; the others do not depend on how many there are.
    assert found[0].token_ids == generator.generate(PROMPTS[0], seed=7, max_new_tokens=15).token_ids
    assert found[3].token_ids == generator.generate(PROMPTS[1], seed=7, max_new_tokens=15).token_ids
    two = generator.generate_batch(PROMPTS[:1], num_return_sequences=2, seed=7, max_new_tokens=15)
    assert ids_of(two) == ids_of(found[:2])
    # The second draws by the seed that the design states.
    options = GenerationOptions(seed=7, max_new_tokens=15).resolve(GenerationOptions(eos_token_id=0))
    ids = generator.tokenizer.encode(PROMPTS[0])
    sampler = Sampler(options, ids, np.random.SeedSequence(7, spawn_key=(1,)))
    row = Row(prompt_ids=ids, max_new_tokens=15, eos_token_ids=frozenset({0}), sampler=sampler)
    for _ in generate(generator.engine, [row]):
        pass
    assert found[1].token_ids == row.token_ids
    with pytest.raises(OptionError, match="generate_batch"):
        generator.generate("a", num_return_sequences=2, seed=1)


def test_a_budget_splits_batches_and_keeps_the_order(
    generator: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = generator.generate_batch(PROMPTS, max_new_tokens=10)
    batches: list[int] = []

    def noted(engine: Any, rows: Any, *rest: Any, **others: Any) -> Any:
        batches.append(max(len(row.prompt_ids) + row.max_new_tokens - 1 for row in rows) * len(rows))
        return generate(engine, rows, *rest, **others)

    monkeypatch.setattr("ortgpt.request.generate", noted)
    progress: list[tuple[int, int]] = []
    found = generator.generate_batch(
        PROMPTS, max_new_tokens=10, batch_tokens=45, on_progress=lambda *each: progress.append(each)
    )
    assert ids_of(found) == ids_of(want)
    assert len(batches) > 1
    assert max(batches) <= 45
    assert progress[-1] == (6, 6)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    for bad in (0, -1, 1.5):
        with pytest.raises(OptionError, match="batch_tokens = "):
            generator.generate_batch(PROMPTS, batch_tokens=bad)  # type: ignore[arg-type]


def test_by_default_a_batchs_cache_is_a_gibibyte_at_most(small: ortgpt.Generator) -> None:
    spec = small.engine.session.cache
    assert small.engine.token_bytes == 2 * 2 * 4 * spec.head_dim * 4
    request = prepare(small, ["a"] * 3, GenerationOptions())
    assert request._batch_tokens == 2**30 // small.engine.token_bytes
