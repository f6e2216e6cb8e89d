"""Cache, batch and context: every shortcut against full recomputation, on a graph and without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import ContextLengthError, GenerationOptions, NonFiniteLogitsError
from ortgpt.bundle.folder import open_bundle
from ortgpt.decode.generate import generate
from ortgpt.decode.row import Row
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import Forward, Logits
from ortgpt.engine.kv_cache import FixedCache, Lengths
from ortgpt.ort.session import plan_session
from ortgpt.sampling.sampler import Sampler
from ortgpt_models import GPT, load_gpt
from support import greedy_ids


def make_row(prompt_ids: Sequence[int], max_new_tokens: int, eos: Sequence[int] = ()) -> Row:
    greedy = Sampler(GenerationOptions().resolve(GenerationOptions()), prompt_ids, None)
    return Row(prompt_ids=prompt_ids, max_new_tokens=max_new_tokens, eos_token_ids=frozenset(eos), sampler=greedy)


def run(engine: Engine, rows: list[Row]) -> list[list[int]]:
    for _ in generate(engine, rows):
        pass
    return [row.token_ids for row in rows]


def step(call: Forward, lengths: Lengths) -> Logits:
    call.run(lengths)
    return call.logits()


def random_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(300, size=int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def gpt(small_checkpoint: Path) -> GPT:
    return load_gpt(small_checkpoint)


@pytest.fixture(scope="module", params=["native", "portable"])
def engine(request: pytest.FixtureRequest, small: ortgpt.Generator, small_portable: ortgpt.Generator) -> Engine:
    """Both flavours, and both kinds of cache."""
    return {"native": small, "portable": small_portable}[request.param].engine


def fixed_cache(engine: Engine, batch_size: int, tokens: int) -> FixedCache:
    cache = engine.new_cache(batch_size, tokens)
    assert isinstance(cache, FixedCache)
    return cache


def oracle(gpt: GPT, ids: Sequence[int]) -> Logits:
    with torch.no_grad():
        logits: Logits = gpt(torch.tensor([list(ids)]))[0].numpy()
    return logits


def test_every_position_and_length_equals_pytorch(engine: Engine, gpt: GPT) -> None:
    ids = random_prompts(1, 1)[0] + list(range(63))
    for length in (1, 2, 3, 8, 9, 63, 64):
        found = engine.prefill(engine.new_cache(1, length), [ids[:length]], np.arange(length)[None])
        assert np.abs(found[0] - oracle(gpt, ids[:length])).max() <= 1e-4


def test_prefill_in_pieces_and_single_steps_equal_pytorch(engine: Engine, gpt: GPT) -> None:
    ids = list(range(100, 150))
    want = oracle(gpt, ids)
    cache = engine.new_cache(1, 50)
    for start, end in ((0, 7), (7, 8), (8, 30), (30, 49), (49, 50)):
        found = engine.prefill(cache, [ids[start:end]], np.arange(end - start)[None])[0]
        assert np.abs(found - want[start:end]).max() <= 1e-4
        assert cache.lengths.tolist() == [end]
    cache = engine.new_cache(1, 50)
    engine.prefill(cache, [ids[:5]])
    call = engine.new_forward(cache)
    for place in range(5, 50):
        call.input_ids[0, 0] = ids[place]
        assert np.abs(step(call, cache.lengths + 1)[0, 0] - want[place]).max() <= 1e-4


def test_ragged_rows_equal_solo_rows_to_the_bit(small: ortgpt.Generator) -> None:
    prompts = [[7], list(range(40)), [5, 6, 7, 8, 9, 10, 11]]
    cache = fixed_cache(small.engine, 3, 60)
    together = small.engine.prefill(cache, prompts)
    call = small.engine.new_forward(cache)
    for row, ids in enumerate(prompts):
        alone = fixed_cache(small.engine, 1, 60)
        assert np.array_equal(small.engine.prefill(alone, [ids])[0], together[row])
        single = small.engine.new_forward(alone)
        cache.lengths[:] = [len(prompt) for prompt in prompts]
        for token_id in (1, 2, 3):
            single.input_ids[...] = call.input_ids[...] = token_id
            assert np.array_equal(step(single, alone.lengths + 1)[0], step(call, cache.lengths + 1)[row])


def test_a_batch_that_holds_tokens_takes_several_more(engine: Engine, gpt: GPT) -> None:
    cache = engine.new_cache(2, 20)
    engine.prefill(cache, [[1, 2, 3], [4]])
    found = engine.prefill(cache, [[5, 6], [7, 8, 9]])
    assert cache.lengths.tolist() == [5, 4]
    for row, ids in enumerate(([1, 2, 3, 5, 6], [4, 7, 8, 9])):
        assert np.abs(found[row, 0] - oracle(gpt, ids)[-1]).max() <= 1e-4
    picked = engine.prefill(cache, [[1, 2], [3, 4]], np.array([[1, 0], [0, 0]]))
    assert np.abs(picked[0, 0] - oracle(gpt, [1, 2, 3, 5, 6, 1, 2])[-1]).max() <= 1e-4
    assert np.abs(picked[1, 1] - oracle(gpt, [4, 7, 8, 9, 3])[-1]).max() <= 1e-4


def test_ragged_rows_of_a_growing_cache_equal_solo_rows(small_portable: ortgpt.Generator, gpt: GPT) -> None:
    """Padding leaves holes between the slots of a row; they must count for nothing, and positions pass them by."""
    engine = small_portable.engine
    prompts = [[7], list(range(40)), [5, 6, 7, 8, 9, 10, 11]]
    cache = engine.new_cache(3, 60)
    together = [engine.prefill(cache, prompts)]
    call = engine.new_forward(cache)
    for token_id in (1, 2, 3):
        call.input_ids[...] = token_id
        together.append(step(call, cache.lengths + 1))
    for row, ids in enumerate(prompts):
        want = oracle(gpt, [*ids, 1, 2, 3])[-4:]
        assert np.abs(np.stack([logits[row, 0] for logits in together]) - want).max() <= 1e-4


def test_slots_beyond_a_rows_length_are_never_read(small: ortgpt.Generator) -> None:
    def steps(poison: float) -> list[Logits]:
        cache = fixed_cache(small.engine, 2, 30)
        for buffer in cache.buffers:
            buffer.fill(poison)
        found = [small.engine.prefill(cache, [[1, 2, 3], list(range(20))]).copy()]
        call = small.engine.new_forward(cache)
        found += [step(call, cache.lengths + 1).copy() for _ in range(3)]
        return found

    for clean, poisoned in zip(steps(0.0), steps(float("nan")), strict=True):
        assert np.array_equal(clean, poisoned)


def test_past_and_present_are_the_same_memory(small: ortgpt.Generator) -> None:
    cache = fixed_cache(small.engine, 1, 10)
    for buffer in cache.buffers:
        buffer.fill(0.0)
    addresses = [buffer.ctypes.data for buffer in cache.buffers]
    small.engine.prefill(cache, [[1, 2, 3, 4]])
    assert [buffer.ctypes.data for buffer in cache.buffers] == addresses
    for buffer in cache.buffers:
        # Heads of 12 are padded to 16: the true part of four slots is written, the padding stays zero.
        assert buffer.shape == (1, 4, 64, 16)
        assert (buffer[:, :, :4, :12] != 0).all()
        assert not buffer[:, :, :4, 12:].any()
        assert not buffer[:, :, 4:].any()


def test_a_row_of_a_cache_is_a_view(small: ortgpt.Generator) -> None:
    cache = fixed_cache(small.engine, 3, 10)
    row = cache.row(1)
    row.lengths[0] = 4
    row.buffers[0][...] = 7.0
    assert cache.lengths.tolist() == [0, 4, 0]
    assert (cache.buffers[0][1] == 7.0).all()
    assert all(buffer.flags.c_contiguous for buffer in row.buffers)


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 64), (64, 64), (65, 128)])
def test_capacity_is_what_the_call_needs_rounded_up(small: ortgpt.Generator, tokens: int, capacity: int) -> None:
    assert fixed_cache(small.engine, 1, tokens).capacity == capacity


def test_greedy_ids_equal_transformers_alone_and_in_a_batch(engine: Engine, small_model: object) -> None:
    prompts = random_prompts(12, 40)
    want = [greedy_ids(small_model, prompt, 24) for prompt in prompts]
    assert [run(engine, [make_row(prompt, 24)])[0] for prompt in prompts] == want
    assert run(engine, [make_row(prompt, 24) for prompt in prompts]) == want


def test_rows_of_a_batch_end_on_their_own(engine: Engine) -> None:
    prompts = random_prompts(4, 20, seed=1)
    alone = [run(engine, [make_row(prompt, 20)])[0] for prompt in prompts]
    eos = alone[1][3]
    rows = [
        make_row(prompts[0], 1),
        make_row(prompts[1], 20, [eos]),
        make_row(prompts[2], 7),
        make_row(prompts[3], 20),
    ]
    gained = [list(active) for active in generate(engine, rows)]
    first = alone[1].index(eos)
    assert [row.token_ids for row in rows] == [alone[0][:1], alone[1][: first + 1], alone[2][:7], alone[3]]
    assert [(row.finish_reason, row.stop_reason) for row in rows] == [
        ("length", None), ("stop", eos), ("length", None), ("length", None),
    ]  # fmt: skip
    assert gained[0] == [0, 1, 2, 3]
    assert gained[1:] == [[i for i in range(4) if len(rows[i].token_ids) > step] for step in range(1, 20)]


def test_a_caller_can_end_a_row(small: ortgpt.Generator) -> None:
    rows = [make_row([1], 10), make_row([2], 10)]
    for _ in generate(small.engine, rows):
        if len(rows[0].token_ids) == 3:
            rows[0].finish_reason = "stop"
    assert [len(row.token_ids) for row in rows] == [3, 10]


def test_the_whole_context_can_be_used_and_not_a_token_more(engine: Engine, small_model: object) -> None:
    prompt = list(range(60))
    assert run(engine, [make_row(prompt, 4)])[0] == greedy_ids(small_model, prompt, 4)
    assert len(run(engine, [make_row(list(range(63)), 1), make_row([1], 63)])[1]) == 63
    for length, new, hint in ((60, 5, "at most 4 new tokens fit"), (64, 1, "shorten"), (100, 1, "shorten")):
        with pytest.raises(ContextLengthError) as caught:
            run(engine, [make_row([1], 1), make_row([1] * length, new)])
        message = str(caught.value)
        ones = "one" if new == 1 else "ones"
        assert f"prompt of {length} tokens and {new} new {ones} exceed the context of 64" in message
        assert "row 1" in message
        assert hint in message


def test_tokens_beyond_the_tokenizer_are_never_picked(small_bundle: Path, small: ortgpt.Generator) -> None:
    prompts = random_prompts(6, 10, seed=2)
    free = run(small.engine, [make_row(prompt, 20) for prompt in prompts])
    limit = int(np.median([token_id for ids in free for token_id in ids]))
    masked = Engine(small.engine.session, small.engine.config, masked_tokens=300 - limit)
    ids = run(masked, [make_row(prompt, 20) for prompt in prompts])
    assert max(map(max, free)) >= limit > max(map(max, ids))


def test_non_finite_logits_raise_with_step_and_row(small_bundle: Path) -> None:
    bundle = open_bundle(small_bundle)
    session = plan_session(bundle).open()
    engine = Engine(session, bundle.config)
    cache_of = engine.new_cache

    def poisoned(batch_size: int, tokens: int, *, max_batch_size: int | None = None) -> object:
        cache = cache_of(batch_size, tokens, max_batch_size=max_batch_size)
        caches.append(cache)
        return cache

    caches: list[object] = []
    engine.new_cache = poisoned  # type: ignore[assignment, method-assign]
    rows = [make_row([1, 2], 8), make_row([3, 4], 8)]
    steps = generate(engine, rows)
    for _ in range(3):
        next(steps)
    caches[0].buffers[0][1, :, 0] = np.nan  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteLogitsError, match="step 3 of row 1"):
        next(steps)


def test_threads_share_one_engine(small: ortgpt.Generator) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = random_prompts(24, 30, seed=3)
    want = [run(small.engine, [make_row(prompt, 15)])[0] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: run(small.engine, [make_row(prompt, 15)])[0], prompts))
    assert found == want
