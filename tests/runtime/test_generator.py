from __future__ import annotations

import array
import asyncio
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import ClosedError, ContextLengthError, OptionError, PromptError, UnknownOptionError
from ortgpt.engine.engine import Engine
from support import greedy_ids

PROMPTS = ["It is a truth", "", "a single man", "universally acknowledged, that", "Café — 日本"]


def test_a_completion_says_all(small: ortgpt.Generator, small_model: Any) -> None:
    prompt_ids = small.tokenizer.encode("It is a truth")
    done = small.generate("It is a truth", max_new_tokens=12, eos_token_id=[])
    assert done.token_ids == greedy_ids(small_model, prompt_ids, 12)
    assert done.text == small.tokenizer.decode(done.token_ids)
    assert (done.finish_reason, done.stop_reason, done.prompt_tokens) == ("length", None, len(prompt_ids))
    assert done.timings.prefill_s > 0
    assert done.timings.decode_s > 0
    assert small.generate(prompt_ids, max_new_tokens=12, eos_token_id=[]).token_ids == done.token_ids
    assert small.generate(np.array(prompt_ids), max_new_tokens=12, eos_token_id=[]).token_ids == done.token_ids


def test_an_empty_prompt_starts_from_end_of_text(small: ortgpt.Generator) -> None:
    done = small.generate("", max_new_tokens=5)
    assert done.prompt_tokens == 1
    assert done.token_ids == small.generate([0], max_new_tokens=5).token_ids
    assert small.generate([], max_new_tokens=5).token_ids == done.token_ids


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 3}, {"top_p": 0.7, "repetition_penalty": 1.3, "seed": 3}]
)
def test_a_row_of_a_batch_equals_its_solo_run(small: ortgpt.Generator, options: dict[str, Any]) -> None:
    together = small.generate_batch(PROMPTS, max_new_tokens=20, **options)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = small.generate(prompt, max_new_tokens=20, **options)
        assert (alone.text, alone.token_ids, alone.finish_reason) == (row.text, row.token_ids, row.finish_reason)


def test_seeds(small: ortgpt.Generator) -> None:
    def draw(**options: Any) -> list[int]:
        return small.generate("a truth", max_new_tokens=20, temperature=1.0, **options).token_ids

    assert draw(seed=1) == draw(seed=1)
    assert draw(seed=1) != draw(seed=2)
    assert draw() != draw()
    rows = small.generate_batch(["a truth"] * 3, max_new_tokens=20, temperature=1.0, seed=[1, 2, 1])
    assert [row.token_ids for row in rows] == [draw(seed=1), draw(seed=2), draw(seed=1)]
    with pytest.raises(OptionError, match="seed has 2 values for 3 rows"):
        small.generate_batch(["a"] * 3, seed=[1, 2])


@pytest.mark.parametrize("options", [{}, {"stop": ["e", "truth"]}, {"temperature": 1.5, "seed": 5}, {"stop": "zzz"}])
def test_streamed_pieces_join_to_the_completion(small: ortgpt.Generator, options: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        done = small.generate(prompt, max_new_tokens=30, **options)
        pieces = list(small.stream(prompt, max_new_tokens=30, **options))
        assert "".join(piece.text for piece in pieces) == done.text
        assert [token_id for piece in pieces for token_id in piece.token_ids] == done.token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [done.finish_reason]


def test_a_stream_checks_at_the_call_and_can_be_left(small: ortgpt.Generator) -> None:
    with pytest.raises(OptionError):
        small.stream("x", top_p=2)
    with pytest.raises(ContextLengthError):
        small.stream("x", max_new_tokens=64)
    stream = small.stream("x", max_new_tokens=20)
    next(stream)
    stream.close()
    assert small.generate("x", max_new_tokens=2).finish_reason == "length"


def test_end_of_text_ends_and_is_no_text(small: ortgpt.Generator) -> None:
    free = small.generate("a man", max_new_tokens=20, eos_token_id=[])
    eos = free.token_ids[6]
    first = free.token_ids.index(eos)
    for given in (eos, [eos], [299, eos], (eos,)):
        done = small.generate("a man", max_new_tokens=20, eos_token_id=given)
        assert done.token_ids == free.token_ids[: first + 1]
        assert done.text == small.tokenizer.decode(free.token_ids[:first])
        assert (done.finish_reason, done.stop_reason) == ("stop", eos)
    held = small.generate("a man", max_new_tokens=20, eos_token_id=eos, min_new_tokens=15)
    assert eos not in held.token_ids[:15]


def test_min_new_tokens_equals_transformers(small: ortgpt.Generator, small_model: Any) -> None:
    free = small.generate("a man", max_new_tokens=20, eos_token_id=[])
    eos = free.token_ids[2]
    ids = small.tokenizer.encode("a man")
    want = greedy_ids(small_model, ids, 20, eos_token_id=eos, min_new_tokens=10)
    assert small.generate("a man", max_new_tokens=20, eos_token_id=eos, min_new_tokens=10).token_ids == want


def test_repetition_penalty_equals_transformers(small: ortgpt.Generator, small_model: Any) -> None:
    for prompt in PROMPTS:
        ids = small.tokenizer.encode(prompt) or [0]
        want = greedy_ids(small_model, ids, 25, repetition_penalty=1.4)
        assert small.generate(prompt, max_new_tokens=25, repetition_penalty=1.4, eos_token_id=[]).token_ids == want


def test_stop_strings_cut_the_text(small: ortgpt.Generator) -> None:
    free = small.generate("a man", max_new_tokens=30, eos_token_id=[])
    for start, length in ((3, 1), (5, 4), (0, 2)):
        stop = free.text[start : start + length]
        done = small.generate("a man", max_new_tokens=30, stop=stop, eos_token_id=[])
        assert done.text == free.text[: free.text.index(stop)]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.token_ids == free.token_ids[: len(done.token_ids)]
        assert len(done.token_ids) < 30
    kept = small.generate("a man", max_new_tokens=30, stop=["\x00never"], eos_token_id=[])
    assert (kept.text, kept.finish_reason) == (free.text, "length")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (None, "prompt = None"),
        (5, "prompt = 5"),
        ([[1, 2]], r"prompt\[0\] = \[1, 2\] \(accepted: a token id, 0 to 299\)$"),
        ([1.5], r"prompt\[0\] = 1\.5 \(accepted: a token id, 0 to 299\)$"),
        ([3, 2.0], r"prompt\[1\] = 2\.0 \("),
        ([True], r"prompt\[0\] = True \("),
        ([1, 2, False], r"prompt\[2\] = False \("),
        ([np.int64(1), np.True_], r"prompt\[1\] = (np\.True_|True) \("),  # as NumPy 2 and 1 write it
        (["a"], r"prompt\[0\] = 'a' \("),
        ([5, None], r"prompt\[1\] = None \("),
        (np.array([3.0, 1.5]), r"prompt\[0\] = 3\.0 \("),
        (np.array([True]), r"prompt\[0\] = True \("),
        (torch.tensor([0.5]), r"prompt\[0\] = 0\.5 \("),
        (np.array([[1]]), r"accepted: a text, or a sequence of token ids\)$"),
        ({1: 2}, r"prompt = \{1: 2\} \(accepted: a text, or a sequence of token ids\)$"),
        ([1, 300], r"prompt\[1\]: token id 300 is not in the vocabulary \(accepted: 0 to 299\)$"),
        ([-1], r"prompt\[0\]: token id -1"),
        ([10**30], r"prompt\[0\]: token id 10{30} is not in the vocabulary"),
        (b"bytes", "prompt = b'bytes'"),
        ([[1], [1, 2]], r"prompt\[0\] = \[1\]"),
    ],
)
def test_bad_prompts_are_refused(small: ortgpt.Generator, prompt: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        small.generate(prompt)
    with pytest.raises(PromptError, match=reason.replace("prompt", r"prompts\[1\]", 1)):
        small.generate_batch([[1], prompt])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: array.array("i", ids)])
def test_ids_of_any_integer_type_are_a_prompt(small: ortgpt.Generator, kind: Any) -> None:
    expected = small.generate([5, 9, 2], max_new_tokens=4).token_ids
    assert small.generate(kind([5, 9, 2]), max_new_tokens=4).token_ids == expected
    mixed: list[Any] = [np.int32(5), 9, np.uint8(2)]
    assert small.generate(mixed, max_new_tokens=4).token_ids == expected
    assert small.generate(np.array([], np.int64), max_new_tokens=4).token_ids == small.generate(
        "", max_new_tokens=4
    ).token_ids  # fmt: skip


def test_bad_calls_are_refused(small: ortgpt.Generator) -> None:
    with pytest.raises(PromptError, match="at least one"):
        small.generate_batch([])
    for prompts in ("text", None, 5):
        with pytest.raises(PromptError, match="accepted: a list of prompts"):
            small.generate_batch(prompts)  # type: ignore[arg-type]
    assert len(small.generate_batch(iter(["a", "b"]), max_new_tokens=1)) == 2
    assert len(small.generate_batch(np.array([[1, 2], [3, 4]]), max_new_tokens=1)) == 2
    with pytest.raises(UnknownOptionError, match="max_tokens"):
        small.generate("x", max_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="eos_token_id = 300"):
        small.generate("x", eos_token_id=300)
    with pytest.raises(OptionError, match="verify = 'no'"):
        ortgpt.load("x", verify="no")


def test_a_closed_generator_says_so(small_bundle: Path) -> None:
    with ortgpt.load(small_bundle, verify="size") as generator:
        assert generator.generate("a", max_new_tokens=1).token_ids
    generator.close()
    with pytest.raises(ClosedError, match="closed"):
        generator.generate("a")


def test_an_error_leaves_the_generator_usable(small: ortgpt.Generator) -> None:
    before = small.generate("a man", max_new_tokens=5)
    with pytest.raises(ContextLengthError):
        small.generate("a man", max_new_tokens=100)
    assert small.generate("a man", max_new_tokens=5).token_ids == before.token_ids


def test_thread_counts_give_the_same_tokens(small_bundle: Path, small: ortgpt.Generator) -> None:
    with ortgpt.load(small_bundle, threads=1) as single:
        assert single.engine.session.threads == 1
        for prompt in PROMPTS:
            assert (
                single.generate(prompt, max_new_tokens=20).token_ids
                == small.generate(prompt, max_new_tokens=20).token_ids
            )
    for threads in (0, -1, 1.5, True, "2"):
        with pytest.raises(OptionError, match="threads = "):
            ortgpt.load(small_bundle, threads=threads)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        "word " * 200_000,
        "\n" * 1_000_000,
        "x" * 200_000,
        "日" * 200_000,
        " " * 200_000 + "a",
        "👩‍👩‍👧" * 20_000,
        "\0" * 200_000,
    ],
    ids=["words", "newlines", "letters", "characters", "spaces", "emoji", "NULs"],
)
def test_prompts_of_any_length_are_refused_by_their_length(small: ortgpt.Generator, prompt: str) -> None:
    with pytest.raises(ContextLengthError, match="exceed the context of 64 tokens"):
        small.generate(prompt)


@pytest.mark.parametrize(
    "prompt", ["\ud800", "a\udfffb", "\0", "\u202eabc\u202c", "👩‍👩‍👧", "e\u0301", "\ufeff", "\x85"]
)
def test_odd_characters_pass_through(small: ortgpt.Generator, prompt: str) -> None:
    ids = small.tokenizer.encode(prompt)
    whole = prompt.encode("utf-8", errors="replace").decode() if "\ud800" <= max(prompt) <= "\udfff" else prompt
    assert small.tokenizer.decode(ids).replace("\ufffd", "?") == whole
    assert small.generate(prompt, max_new_tokens=2, eos_token_id=[]).prompt_tokens == len(ids)


def test_an_exception_in_a_callers_function_frees_everything(
    small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[weakref.ref[Any]] = []
    real = Engine.new_cache

    def noted(self: Engine, *args: Any, **keywords: Any) -> Any:
        cache = real(self, *args, **keywords)
        caches.append(weakref.ref(cache))
        return cache

    def fail(ids: Any, logits: Any) -> Any:
        return logits if len(ids) < 8 else 1 // 0

    monkeypatch.setattr(Engine, "new_cache", noted)
    want = small.generate("It is", max_new_tokens=4).token_ids
    options: dict[str, Any] = {"logits_processor": fail, "max_new_tokens": 20}
    for call in (
        lambda: small.generate("It is", **options),
        lambda: small.generate_batch(["It is", "a"], **options),
        lambda: list(small.stream("It is", **options)),
        lambda: small.conversation("It").generate(" is", **options),
        lambda: asyncio.run(small.agenerate("It is", **options)),
    ):
        before = len(caches)
        with pytest.raises(ZeroDivisionError):
            call()
        assert len(caches) > before
        deadline = time.monotonic() + 30
        while any(cache() is not None for cache in caches):  # the thread of an asynchronous call takes a moment to end
            assert time.monotonic() < deadline
            gc.collect()
    assert small.generate("It is", max_new_tokens=4).token_ids == want
