"""Guesses change no token: look-up and a draft model against plain decoding, and their distribution when drawing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt import OptionError
from ortgpt.decode.drafts import PromptLookup
from ortgpt_exporter import export_bundle
from support import write_checkpoint

REPEATED = "that a man that a man that a man that a man"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ortgpt.Generator]:
    """Another model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    bundle = export_bundle(write_checkpoint(folder / "checkpoint", seed=5, n_layer=1), folder / "bundle")
    with ortgpt.load(bundle.path) as generator:
        yield generator


@pytest.fixture(params=["native", "portable"])
def generator(
    request: pytest.FixtureRequest, small: ortgpt.Generator, small_portable: ortgpt.Generator
) -> ortgpt.Generator:
    return {"native": small, "portable": small_portable}[request.param]


OPTIONS: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.3}, {"temperature": 0.8, "top_k": 5, "seed": 3}, {"temperature": 1.5, "seed": 4},
    {"no_repeat_ngram_size": 3}, {"logprobs": 2}, {"stop": ["e", "zz"]}, {"min_new_tokens": 9, "eos_token_id": 5},
    {"context_overflow": "slide", "slide_tokens": 9, "keep_tokens": 3, "max_new_tokens": 100},
    {"logits_processor": lambda ids, logits: np.where(np.arange(300) % 7 == len(ids) % 7, logits + 9, logits)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["lookup", "draft", "itself"])
def test_guesses_change_no_token(
    generator: ortgpt.Generator, draft: ortgpt.Generator, options: dict[str, Any], kind: str
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "lookup": {"prompt_lookup_num_tokens": 6},
        "draft": {"assistant_model": draft},
        "itself": {"assistant_model": generator, "num_assistant_tokens": 3},
    }
    guesses = kinds[kind]
    settings: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": []}
    settings |= options
    for prompt in (REPEATED, "a", "It is a truth universally"):
        plain = generator.generate(prompt, **settings)
        done = generator.generate(prompt, **settings, **guesses)
        assert (done.token_ids, done.text) == (plain.token_ids, plain.text)
        assert (done.finish_reason, done.stop_reason) == (plain.finish_reason, plain.stop_reason)
        pieces = list(generator.stream(prompt, **settings, **guesses))
        assert "".join(piece.text for piece in pieces) == plain.text
        if plain.logprobs is not None and done.logprobs is not None:
            for found, want in zip(done.logprobs, plain.logprobs, strict=True):
                assert found.logprob == pytest.approx(want.logprob, abs=1e-4)


def test_guesses_that_are_right_save_runs(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is made to repeat itself goes several tokens at a time; its own draft guesses all."""
    period = small.tokenizer.encode(" universally acknowledged, that")

    def again(ids: Any, logits: Any) -> Any:
        logits[period[(len(ids) - 4) % len(period)]] = 1e4
        return logits

    runs: list[int] = []
    new_forward = small.engine.new_forward

    def noted(cache: Any, **shape: Any) -> Any:
        call = new_forward(cache, **shape)
        run = call.run

        def counted(*args: Any, **keywords: Any) -> None:
            runs.append(call.input_ids.shape[1])
            run(*args, **keywords)

        call.run = counted  # type: ignore[method-assign]
        return call

    monkeypatch.setattr(small.engine, "new_forward", noted)
    options: dict[str, Any] = {"max_new_tokens": 56, "logits_processor": again, "eos_token_id": []}
    want = small.generate([1, 2, 3, 4], **options)
    assert len(runs) == 56
    runs.clear()
    found = small.generate([1, 2, 3, 4], **options, prompt_lookup_num_tokens=8)
    assert found.token_ids == want.token_ids
    assert len(runs) <= len(period) + 3 + 56 // 4
    runs.clear()
    itself = small.generate("a man", max_new_tokens=40, assistant_model=small, num_assistant_tokens=4)
    assert runs.count(5) + runs.count(7) + runs.count(9) >= 4  # 4, 6, 8 guesses at once, and the token before them
    assert itself.token_ids == small.generate("a man", max_new_tokens=40).token_ids


def test_end_of_text_inside_a_guessed_block_ends(small: ortgpt.Generator) -> None:
    free = small.generate("a man", max_new_tokens=30, eos_token_id=[])
    for place in (1, 2, 3, 7, 20):
        options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": free.token_ids[place]}
        want = small.generate("a man", **options)
        found = small.generate("a man", **options, assistant_model=small, num_assistant_tokens=5)
        assert (found.token_ids, found.finish_reason) == (want.token_ids, "stop")
    for length in range(1, 12):
        done = small.generate("a man", max_new_tokens=length, eos_token_id=[], assistant_model=small)
        assert done.token_ids == free.token_ids[:length]


def test_draws_have_the_distribution_of_the_model(small: ortgpt.Generator, draft: ortgpt.Generator) -> None:
    """Chi-square over 27 outcomes of three draws among three tokens, whose probabilities are computed one by one."""
    prompt, count = [7, 8, 9], 1500
    expected: dict[tuple[int, ...], float] = {}
    for places in itertools.product(range(3), repeat=3):
        ids, probability = list(prompt), 1.0
        for place in places:
            best = small.generate(ids, max_new_tokens=1, logprobs=3, eos_token_id=[]).logprobs[0].top  # type: ignore[index]
            weights = np.exp([logprob / 1.5 for _, logprob in best])
            probability *= float(weights[place] / weights.sum())
            ids.append(best[place][0])
        expected[tuple(ids[3:])] = probability
    drawn = Counter(
        tuple(
            small.generate(
                prompt, max_new_tokens=3, temperature=1.5, top_k=3, seed=seed, eos_token_id=[], assistant_model=draft
            ).token_ids
        )
        for seed in range(count)
    )
    assert set(drawn) <= set(expected)
    merged = [(drawn[ids], count * probability) for ids, probability in expected.items() if count * probability >= 5]
    chi_square = sum((found - want) ** 2 / want for found, want in merged)
    assert len(merged) >= 8
    assert chi_square < 2 * len(merged) + 25  # beyond p = 0.001 for 8 to 27 outcomes


def test_lookup_finds_what_followed_and_gives_up_where_it_does_not_pay() -> None:
    lookup = PromptLookup(8)
    assert lookup.propose([1, 2, 3, 4, 1, 2], 9) == [3, 4]
    lookup.learn(2, 2)
    assert lookup.propose([1, 2, 3, 4, 1, 2, 3, 4, 1], 9) == [2, 3, 4, 1]
    assert lookup.propose([1, 2, 3, 4, 1, 2, 3, 4, 1], 1) == [2]
    never_right = PromptLookup(8)
    rng, cost, ids = np.random.default_rng(0), 0.0, [0, 1]
    for _ in range(3000):
        ids.append(int(rng.integers(3)))
        proposed = never_right.propose(ids, 100)
        if proposed:
            never_right.learn(len(proposed), 0)
            cost += 0.4 * len(proposed)
    assert 0 < cost <= 1 + 0.02 * 3000


def test_what_guesses_exclude(small: ortgpt.Generator, austen_bundle: Path) -> None:
    with ortgpt.load(austen_bundle) as other, pytest.raises(OptionError, match="another tokenizer"):
        small.generate("a", assistant_model=other)
    for options, part in (
        ({"assistant_model": small, "prompt_lookup_num_tokens": 3}, "both propose drafts"),
        ({"num_assistant_tokens": 3}, "no effect without an assistant_model"),
        ({"assistant_model": "x"}, "assistant_model = 'x'"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens = 0"),
        ({"prompt_lookup_num_tokens": 33}, "prompt_lookup_num_tokens = 33 .*from 1 to 32"),
        ({"prompt_lookup_num_tokens": 3, "deterministic": True}, "it takes no drafts"),
    ):
        with pytest.raises(OptionError, match=part):
            small.generate("a", **options)
