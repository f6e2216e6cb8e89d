"""Beam search against `transformers`' own on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import OptionError


def beams_of_transformers(model: Any, ids: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), do_sample=False,
            return_dict_in_generate=True, output_scores=True, pad_token_id=299, **options,
        )  # fmt: skip
    eos = options.get("eos_token_id", [])
    eos = [eos] if isinstance(eos, int) else eos
    rows = []
    for row in found.sequences[:, len(ids) :].tolist():
        end = next((place + 1 for place, token_id in enumerate(row) if token_id in eos), len(row))
        rows.append(row[:end])
    return rows, found.sequences_scores.tolist()


@pytest.mark.parametrize("flavour", ["native", "portable"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 4, "length_penalty": 0.0, "num_return_sequences": 2},
        {"num_beams": 3, "length_penalty": -1.5},
        {"num_beams": 5, "length_penalty": 2.0, "early_stopping": True, "num_return_sequences": 3},
        {"num_beams": 3, "early_stopping": "never"},
        {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"num_beams": 4, "min_new_tokens": 6, "suppress_tokens": [5, 6]},
    ],
)
def test_beams_and_scores_equal_those_of_transformers(
    small: ortgpt.Generator, small_portable: ortgpt.Generator, small_model: Any, options: dict[str, Any], flavour: str
) -> None:
    generator = {"native": small, "portable": small_portable}[flavour]
    rng = np.random.default_rng(4)
    ended = 0
    for trial in range(6):
        ids = rng.integers(300, size=int(rng.integers(2, 20))).tolist()
        # Some ids that are likely, so that beams end early.
        free = small.generate(ids, max_new_tokens=12, eos_token_id=[]).token_ids
        eos = free[5:6] if trial % 2 else free[3:5]
        want, scores = beams_of_transformers(small_model, ids, max_new_tokens=12, eos_token_id=eos, **options)
        found = generator.generate_batch([ids], max_new_tokens=12, eos_token_id=eos, **options)
        assert [each.token_ids for each in found] == want
        assert [each.score for each in found] == pytest.approx(scores, abs=1e-4, rel=1e-6)
        ended += sum(each.finish_reason == "stop" for each in found)
    assert ended


def test_one_beam_search_among_other_prompts(small: ortgpt.Generator) -> None:
    options = [ortgpt.GenerationOptions(num_beams=beams) for beams in (1, 3, 1)]
    found = small.generate_batch(["It is", "a man", "truth"], options, max_new_tokens=8)
    for prompt, each, row in zip(["It is", "a man", "truth"], options, found, strict=True):
        assert small.generate(prompt, each, max_new_tokens=8).token_ids == row.token_ids


def test_a_stop_string_ends_a_beam(small: ortgpt.Generator) -> None:
    free = small.generate("a man", max_new_tokens=10, num_beams=3, eos_token_id=[])
    stop = free.text[4:6]
    done = small.generate("a man", max_new_tokens=10, num_beams=3, eos_token_id=[], stop=stop)
    assert stop not in done.text
    assert (done.finish_reason, done.stop_reason) in (("stop", stop), ("length", None))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "temperature = 0.5 cannot be had with num_beams = 2"),
        ({"num_beams": 2, "do_sample": True}, "do_sample = True"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams = 2"),
        ({"num_return_sequences": 2}, "the same text again"),
        ({"length_penalty": 2.0}, "no effect without num_beams"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs = 1 cannot be had"),
        ({"num_beams": 0}, "num_beams = 0"),
        ({"early_stopping": "maybe"}, "early_stopping = 'maybe'"),
    ],
)
def test_what_beams_exclude(small: ortgpt.Generator, options: dict[str, Any], part: str) -> None:
    with pytest.raises(OptionError, match=part):
        small.generate_batch(["a"], **options)


def test_beams_are_not_streamed(small: ortgpt.Generator) -> None:
    with pytest.raises(OptionError, match=r"num_beams = 2 .*streaming"):
        small.stream("a", num_beams=2)
