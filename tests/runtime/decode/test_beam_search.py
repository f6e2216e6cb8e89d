"""Beam search against `transformers`' own on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import OptionError
from ortgpt.engine.kv_cache import FixedCache


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


def test_a_stop_string_ends_a_beam_as_end_of_text_does(small: ortgpt.Generator) -> None:
    """A token whose text only it has, as stop string and as end-of-text: the same beams, but for the token itself."""
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "num_return_sequences": 3, "length_penalty": 0.5}
    ended = 0
    for seed in range(8):
        ids = np.random.default_rng(seed).integers(300, size=8).tolist()
        free = small.generate_batch([ids], eos_token_id=[], **options)[0]
        for token_id in free.token_ids[2:8]:
            stop = small.tokenizer.decode([token_id])
            others = [each for each in range(300) if each != token_id and stop in small.tokenizer.decode([each])]
            if "\ufffd" in stop or others or len(stop) > 1:
                continue
            by_text = small.generate_batch([ids], stop=stop, eos_token_id=[], **options)
            by_id = small.generate_batch([ids], eos_token_id=token_id, **options)
            assert [each.token_ids for each in by_text] == [each.token_ids for each in by_id]
            assert [each.score for each in by_text] == [each.score for each in by_id]
            ended += sum(each.stop_reason == stop for each in by_text)
    assert ended


def test_no_token_left_is_an_error(small: ortgpt.Generator) -> None:
    with pytest.raises(OptionError, match="leave no token to pick"):
        small.generate("a", num_beams=2, suppress_tokens=range(300))


def test_beams_on_a_cache_without_buffers(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where rows are moved by way of the CPU, into the memory that is bound."""
    want = small.generate_batch(["a man"], num_beams=4, num_return_sequences=4, max_new_tokens=12)
    new_cache = small.engine.new_cache

    def on_device(batch_size: int, tokens: int, *, max_batch_size: int | None = None) -> FixedCache:
        cache = new_cache(batch_size, tokens, max_batch_size=max_batch_size)
        assert isinstance(cache, FixedCache)
        values = [small.engine.session.empty(buffer.shape, "float32") for buffer in cache.buffers]
        return FixedCache(cache.session, cache.capacity, values, [], cache.lengths)

    monkeypatch.setattr(small.engine, "new_cache", on_device)
    found = small.generate_batch(["a man"], num_beams=4, num_return_sequences=4, max_new_tokens=12)
    assert [(each.token_ids, each.score) for each in found] == [(each.token_ids, each.score) for each in want]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "temperature = 0.5 cannot be combined with num_beams = 2"),
        ({"num_beams": 2, "do_sample": True}, "do_sample = True"),
        ({"num_beams": 2, "num_return_sequences": 3}, "at most num_beams = 2"),
        ({"num_return_sequences": 2}, "identical texts"),
        ({"length_penalty": 2.0}, "no effect without num_beams"),
        ({"num_beams": 2, "logprobs": 1}, "logprobs = 1 cannot be combined"),
        ({"num_beams": 0}, "num_beams = 0"),
        ({"num_beams": 257}, "num_beams = 257 .*from 1 to 256"),
        ({"num_beams": 2, "deterministic": True}, "deterministic = True cannot be combined"),
        ({"early_stopping": "maybe"}, "early_stopping = 'maybe'"),
    ],
)
def test_what_beams_exclude(small: ortgpt.Generator, options: dict[str, Any], part: str) -> None:
    with pytest.raises(OptionError, match=part):
        small.generate_batch(["a"], **options)


def test_beams_are_not_streamed(small: ortgpt.Generator) -> None:
    with pytest.raises(OptionError, match=r"num_beams = 2 .*streaming"):
        small.stream("a", num_beams=2)
