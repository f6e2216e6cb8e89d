"""What was computed before and is used again: the same tokens, and only what is new computed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt import ContextLengthError, ConversationError, OptionError
from ortgpt.engine.prefix_cache import PrefixCache


@pytest.fixture(params=["native", "portable"])
def generator(
    request: pytest.FixtureRequest, small: ortgpt.Generator, small_portable: ortgpt.Generator
) -> ortgpt.Generator:
    return {"native": small, "portable": small_portable}[request.param]


@pytest.fixture
def fed(generator: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill was given."""
    counts: list[int] = []
    prefill_forward = generator.engine.prefill_forward

    def noted(cache: Any, prompts: Any, *rest: Any) -> Any:
        counts.append(sum(map(len, prompts)))
        return prefill_forward(cache, prompts, *rest)

    monkeypatch.setattr(generator.engine, "prefill_forward", noted)
    return counts


@pytest.fixture
def prefixes(generator: ortgpt.Generator) -> Iterator[PrefixCache]:
    yield generator.prefix_cache(size_bytes=2**24)
    generator.prefix_cache(size_bytes=0)


def random_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(300, size=count).tolist()
    return ids


def test_prompts_that_begin_alike_are_computed_once(
    generator: ortgpt.Generator, prefixes: PrefixCache, fed: list[int]
) -> None:
    shared = random_ids(30)
    prompts = [[*shared, *random_ids(5, seed)] for seed in range(1, 4)]
    first = generator.generate(shared, max_new_tokens=2, eos_token_id=[])
    assert fed == [30]
    assert generator.generate(shared, max_new_tokens=2, eos_token_id=[]).token_ids == first.token_ids
    assert fed == [30, 1]
    found = [generator.generate(prompt, max_new_tokens=8).token_ids for prompt in prompts]
    assert fed == [30, 1, 5, 5, 5]
    assert generator.generate(prompts[0], max_new_tokens=8).token_ids == found[0]
    assert prefixes.reused_tokens == 29 + 30 * 3 + 34
    together = generator.generate_batch([*prompts, random_ids(9, 9)], max_new_tokens=8)
    generator.prefix_cache(size_bytes=0)
    assert [generator.generate(prompt, max_new_tokens=8).token_ids for prompt in prompts] == found
    assert [each.token_ids for each in together[:3]] == found
    assert together[3].token_ids == generator.generate(random_ids(9, 9), max_new_tokens=8).token_ids


def test_a_prefix_cache_is_off_unless_asked_for(generator: ortgpt.Generator, fed: list[int]) -> None:
    for _ in range(2):
        generator.generate(random_ids(12), max_new_tokens=2)
    assert fed == [12, 12]
    for bad in (-1, 1.5, True):
        with pytest.raises(OptionError, match="size_bytes = "):
            generator.prefix_cache(size_bytes=bad)  # type: ignore[arg-type]


def test_a_prefix_cache_keeps_to_its_size_and_lets_the_oldest_go() -> None:
    def held(tokens: int) -> list[Any]:
        return [np.full((2, tokens, 8), tokens, np.float32)] * 2

    size = sum(part.nbytes for part in held(10))
    cache = PrefixCache(3 * size)
    for start in (1, 2, 3):
        cache.keep([start] * 10, lambda: held(10))
    assert (len(cache), cache.used_bytes) == (3, 3 * size)
    assert cache.find([1] * 9) is not None  # used now, so the second is the oldest
    cache.keep([4] * 10, lambda: held(10))
    assert (len(cache), cache.used_bytes) == (3, 3 * size)
    assert cache.find([2] * 9) is None
    found = cache.find([1] * 6 + [7] * 3)
    assert found is not None
    assert found[0].shape == (2, 6, 8)
    assert cache.find([1]) is None  # one token has to be computed for its logits
    cache.keep([9] * 40, lambda: held(40))  # larger than all
    assert cache.find([9] * 40) is None
    cache.keep([1] * 12, lambda: held(12))  # what is its beginning goes
    assert (len(cache), cache.used_bytes) == (2, size + sum(part.nbytes for part in held(12)))
    cache.clear()
    assert (len(cache), cache.used_bytes) == (0, 0)


def test_a_conversation_computes_only_what_is_new(generator: ortgpt.Generator, fed: list[int]) -> None:
    talk = generator.conversation("It is a truth")
    ids = generator.tokenizer.encode("It is a truth")
    first = talk.generate(" that", max_new_tokens=5, eos_token_id=[])
    ids += generator.tokenizer.encode(" that")
    assert fed == [len(ids)]
    ids += first.token_ids
    assert talk.token_ids == ids
    assert talk.text == "It is a truth that" + first.text
    more = generator.tokenizer.encode(" a man")
    second = talk.generate(" a man", max_new_tokens=5, eos_token_id=[])
    assert fed[1] == len(more) + 1  # and the last token of the first turn
    ids += more
    fed.clear()
    assert second.token_ids == generator.generate(ids, max_new_tokens=5, eos_token_id=[]).token_ids
    fed.clear()
    branch = talk.branch()
    third = talk.generate(max_new_tokens=3, eos_token_id=[])
    assert branch.generate(max_new_tokens=3, eos_token_id=[]).token_ids == third.token_ids
    assert fed == [1, 1]
    talk.rewind()
    talk.rewind()
    assert talk.text == "It is a truth that" + first.text
    fed.clear()
    again = talk.generate(" a man", max_new_tokens=5, eos_token_id=[])
    assert again.token_ids == second.token_ids
    assert fed == [1]  # what was taken back and is said again is still held
    assert branch.token_ids[len(ids) + 5 :] == third.token_ids
    for turns in (0, 9, True):
        with pytest.raises(OptionError, match="turns = "):
            talk.rewind(turns)


def test_a_stop_string_does_not_stay_in_a_conversation(small: ortgpt.Generator) -> None:
    free = small.generate("a man", max_new_tokens=30, eos_token_id=[])
    for start, length in ((3, 1), (5, 4), (6, 2)):
        talk = small.conversation("a man")
        done = talk.generate(max_new_tokens=30, eos_token_id=[], stop=free.text[start : start + length])
        assert talk.text == "a man" + done.text
        assert talk.generate(" more", max_new_tokens=4).token_ids == talk.token_ids[-4:]
    eos = free.token_ids[4]
    talk = small.conversation("a man")
    talk.generate(max_new_tokens=30, eos_token_id=eos)
    assert eos not in talk.token_ids[-4:]


def test_a_conversation_streams_guesses_and_fails_whole(small: ortgpt.Generator) -> None:
    talk = small.conversation("a man")
    pieces = list(talk.stream(max_new_tokens=8, prompt_lookup_num_tokens=4))
    assert talk.text == "a man" + "".join(piece.text for piece in pieces)
    before = list(talk.token_ids)
    with pytest.raises(ContextLengthError):
        talk.generate([1] * 60, max_new_tokens=20)
    assert talk.token_ids == before
    left = talk.stream(max_new_tokens=8)
    next(left)
    for begin in (lambda: talk.generate("x"), talk.rewind, talk.branch):
        with pytest.raises(ConversationError, match="still being streamed"):
            begin()
    left.close()
    assert len(before) < len(talk.token_ids) < len(before) + 8
    for options in ({"num_beams": 2}, {"num_return_sequences": 2, "seed": 1}, {"context_overflow": "slide"}):
        with pytest.raises(OptionError, match="in a conversation"):
            talk.generate("a", **options)


@pytest.mark.parametrize("guesses", [{}, {"prompt_lookup_num_tokens": 6}, {"assistant_model": None}])
def test_a_stream_that_is_left_leaves_the_cache_right(small: ortgpt.Generator, guesses: dict[str, Any]) -> None:
    """Guesses that were not looked at yet must not be taken for the text: the next turn is that of a fresh one."""
    guesses = {name: small if name == "assistant_model" else value for name, value in guesses.items()}
    for pieces in range(1, 8):
        talk = small.conversation("that a man that a man that a man that")
        stream = talk.stream(max_new_tokens=20, eos_token_id=[], **guesses)
        for _ in range(pieces):
            next(stream)
        stream.close()
        found = talk.generate(" a man", max_new_tokens=5, logprobs=0, eos_token_id=[])
        want = small.generate(talk.token_ids[:-5], max_new_tokens=5, logprobs=0, eos_token_id=[])
        assert found.token_ids == want.token_ids
        assert [each.logprob for each in found.logprobs or ()] == pytest.approx(
            [each.logprob for each in want.logprobs or ()], abs=1e-4
        )


def test_a_turn_that_is_deterministic_uses_nothing_again(
    small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = small.conversation("It is a truth")
    talk.generate(max_new_tokens=4)
    lengths = len(talk.token_ids)
    fed: list[int] = []
    prefill_forward = small.engine.prefill_forward

    def noted(cache: Any, prompts: Any, *rest: Any) -> Any:
        fed.append(len(prompts[0]))
        return prefill_forward(cache, prompts, *rest)

    monkeypatch.setattr(small.engine, "prefill_forward", noted)
    talk.generate(max_new_tokens=4, deterministic=True)
    assert fed == [lengths]


def test_a_text_begun_from_nothing_does_not_show_its_start(small: ortgpt.Generator) -> None:
    talk = small.conversation()
    done = talk.generate(max_new_tokens=4, eos_token_id=[])
    assert talk.text == done.text
    assert talk.branch().text == done.text
    assert talk.rewind() == []
    assert talk.text == ""
    with pytest.raises(OptionError, match="there is no turn to take back"):
        talk.rewind()
    talk.generate("a man", max_new_tokens=4)
    assert talk.rewind() == small.tokenizer.encode("a man")


def test_a_turn_that_fails_leaves_the_text_as_it_was(small: ortgpt.Generator) -> None:
    def fail(ids: Any, logits: Any) -> Any:
        if len(ids) > len(before) + 4:
            raise KeyError("mine")
        return logits

    talk = small.conversation("It is a truth")
    talk.generate(max_new_tokens=4, eos_token_id=[])
    before = list(talk.token_ids)
    with pytest.raises(KeyError, match="mine"):
        talk.generate(" a", max_new_tokens=9, eos_token_id=[], logits_processor=fail)
    assert talk.token_ids == before
    done = talk.generate(" a", max_new_tokens=5, eos_token_id=[])
    ids = [*before, *small.tokenizer.encode(" a")]
    assert done.token_ids == small.generate(ids, max_new_tokens=5, eos_token_id=[]).token_ids


def test_a_conversation_says_that_it_cannot_be_pickled(small: ortgpt.Generator) -> None:
    for make in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"keep its token_ids, and begin one with them, or branch\(\) it"):
            make(small.conversation("a"))


def test_a_batch_is_computed_at_once_unless_what_is_known_saves_more(
    small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is not empty takes rows one by one, so a short prefix would make a batch slower."""
    forwards: list[tuple[int, int]] = []
    prefill_forward = small.engine.prefill_forward

    def noted(cache: Any, prompts: Any, *rest: Any) -> Any:
        forwards.append((len(prompts), sum(map(len, prompts))))
        return prefill_forward(cache, prompts, *rest)

    monkeypatch.setattr(small.engine, "prefill_forward", noted)
    options: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": []}
    shared = random_ids(40)
    short = [[shared[0], *random_ids(7, seed)] for seed in range(1, 33)]
    long = [[*shared, *random_ids(4, seed)] for seed in range(1, 9)]
    one_long = [*short[:7], long[0]]
    cases: list[tuple[list[list[int]], list[tuple[int, int]], int]] = [
        (short, [(32, 32 * 8)], 0),  # one known token each: 32 forwards would take longer than one
        (long, [(1, 4)] * 8, 8 * 40),
        (one_long, [(1, 7)] * 7 + [(1, 4)], 7 + 40),  # in one forward, seven rows would be padded to 44 tokens
        ([long[0]], [(1, 4)], 40),
        ([short[0]], [(1, 7)], 1),  # alone, each known token is one less
    ]
    for prompts, want, reused in cases:
        small.prefix_cache(size_bytes=0)
        plain = [each.token_ids for each in small.generate_batch(prompts, **options)]
        prefixes = small.prefix_cache(size_bytes=2**24)
        small.generate(shared, max_new_tokens=1)
        forwards.clear()
        assert [each.token_ids for each in small.generate_batch(prompts, **options)] == plain
        assert (forwards, prefixes.reused_tokens) == (want, reused)
    small.prefix_cache(size_bytes=0)
