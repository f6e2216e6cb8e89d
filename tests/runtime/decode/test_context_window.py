"""Texts beyond the context: what the model sees of them, and that what it computes is a recomputation of just that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import ContextLengthError, GenerationOptions, OptionError
from ortgpt.decode.context_window import ContextWindow
from ortgpt_models import GPT, load_gpt


@pytest.fixture(scope="module")
def gpt(small_checkpoint: Path) -> GPT:
    return load_gpt(small_checkpoint)


def test_what_a_window_shows_depends_on_the_length_alone() -> None:
    window = ContextWindow(10, keep=2, stride=3)
    for length, want in (
        (9, [*range(9)]),
        (10, [*range(10)]),
        (11, [0, 1, 5, 6, 7, 8, 9, 10]),
        (13, [0, 1, 5, 6, 7, 8, 9, 10, 11, 12]),
        (14, [0, 1, 8, 9, 10, 11, 12, 13]),
        (17, [0, 1, 11, 12, 13, 14, 15, 16]),
    ):
        assert list(window.of(range(length))) == want


@pytest.mark.parametrize("flavour", ["native", "portable"])
@pytest.mark.parametrize(
    ("keep", "stride", "length"), [(0, None, 30), (5, 7, 30), (0, 1, 60), (10, 50, 200), (63 - 1, 1, 64)]
)
def test_sliding_equals_the_recomputation_of_what_is_seen(
    small: ortgpt.Generator, small_portable: ortgpt.Generator, gpt: GPT, keep: int, stride: int | None, length: int,
    flavour: str,
) -> None:  # fmt: skip
    generator = {"native": small, "portable": small_portable}[flavour]
    prompts = [np.random.default_rng(seed).integers(300, size=length - 9 * seed).tolist() for seed in range(2)]
    options: dict[str, Any] = {"context_overflow": "slide", "max_new_tokens": 90, "eos_token_id": []}
    options |= {"keep_tokens": keep, "slide_tokens": stride} if stride else {}
    alone = [generator.generate(prompt, **options) for prompt in prompts]
    together = generator.generate_batch(prompts, **options)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    window = ContextWindow(64, keep, stride or 31)
    for prompt, done in zip(prompts, alone, strict=True):
        assert len(done.token_ids) == 90
        assert done.prompt_tokens == len(prompt)
        ids = [*prompt]
        for token_id in done.token_ids:
            with torch.no_grad():
                logits = gpt(torch.tensor([list(window.of(ids))]))[0, -1].numpy()
            assert logits[token_id] >= logits.max() - 1e-4
            ids.append(token_id)


def test_truncating_keeps_the_beginning_asked_for_and_the_newest(small: ortgpt.Generator) -> None:
    ids = np.random.default_rng(1).integers(300, size=100).tolist()
    for keep in (0, 4):
        done = small.generate(ids, context_overflow="truncate", max_new_tokens=20, keep_tokens=keep)
        assert done.prompt_tokens == 44
        want = [*ids[:keep], *ids[100 - (44 - keep) :]]
        assert done.token_ids == small.generate(want, max_new_tokens=20).token_ids
    short = small.generate(ids[:10], context_overflow="truncate", max_new_tokens=20)
    assert short.token_ids == small.generate(ids[:10], max_new_tokens=20).token_ids
    # Without a length half of the context is kept free, or what a prompt that fits leaves.
    assert small.generate(ids, context_overflow="truncate").prompt_tokens == 32
    assert small.generate(ids[:62], context_overflow="truncate").prompt_tokens == 62


def test_what_does_not_fit_is_refused_with_the_numbers(small: ortgpt.Generator) -> None:
    ids = [1] * 100
    with pytest.raises(ContextLengthError, match="100 tokens and 5 new ones exceed the context of 64") as caught:
        small.generate(ids, max_new_tokens=5)
    assert 'or give context_overflow = "truncate", which shortens the prompt, or "slide"' in str(caught.value)
    with pytest.raises(ContextLengthError, match="70 new ones exceed"):
        small.generate(ids, max_new_tokens=70, context_overflow="truncate")
    for options, part in (
        ({"context_overflow": "truncate", "keep_tokens": 60, "max_new_tokens": 8}, "keep_tokens = 60 .*at most 55"),
        ({"context_overflow": "slide", "keep_tokens": 60, "slide_tokens": 8}, "slide_tokens = 8 with keep_tokens = 60"),
        ({"context_overflow": "slide", "keep_tokens": 70}, "keep_tokens = 70"),
        ({"context_overflow": "drop"}, "context_overflow = 'drop'"),
        ({"keep_tokens": 3}, "no effect without context_overflow"),
        ({"context_overflow": "truncate", "slide_tokens": 3}, 'no effect without context_overflow "slide"'),
    ):
        with pytest.raises(OptionError, match=part):
            small.generate(ids, **options)


def test_what_does_not_fit_is_named_with_what_would_help_it(small: ortgpt.Generator) -> None:
    fits, long = [1], [1] * 100
    plain = GenerationOptions(max_new_tokens=5)
    truncated, cut = (GenerationOptions(max_new_tokens=most, context_overflow="truncate") for most in (5, 70))
    sliding = GenerationOptions(max_new_tokens=70, context_overflow="slide")
    for prompts, options, named, helps in (
        ([fits, fits, long], [truncated, plain, plain],
         "prompts[2]: a prompt of 100 tokens and 5 new", '= "truncate", which shortens the prompt, or "slide"'),
        ([long, fits, fits], [sliding, plain, cut], "prompts[2]: a prompt of 1 tokens and 70 new", '= "slide", which'),
        ([fits, long], [sliding, plain], "prompts[1]: a prompt of 100", '= "truncate", which'),
    ):  # fmt: skip
        with pytest.raises(ContextLengthError) as caught:
            small.generate_batch(prompts, options)
        message = str(caught.value)
        assert message.startswith(named)
        assert f"give context_overflow {helps}" in message
    with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: .* exceed the context"):
        small.generate_batch([fits, long], num_return_sequences=3, seed=1, max_new_tokens=5)
    with pytest.raises(ContextLengthError, match="exceed the context") as caught:
        small.generate(long, num_beams=2, max_new_tokens=5)
    assert "context_overflow" not in str(caught.value)  # which beams do not have


def test_penalties_see_what_slid_out(small: ortgpt.Generator) -> None:
    options = GenerationOptions(context_overflow="slide", max_new_tokens=150, eos_token_id=[], no_repeat_ngram_size=1)
    done = small.generate([1, 2, 3], options)
    assert len({*done.token_ids}) == 150
