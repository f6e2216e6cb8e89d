"""Each processor against `transformers`' own, on random logits and ids; those it has not, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ortgpt import GenerationOptions, OptionError
from ortgpt.options.resolved import ResolvedOptions
from ortgpt.sampling.processors import make_processors
from ortgpt.sampling.sampler import Sampler
from ortgpt.sampling.warpers import Floats, candidates

SIZE = 60


def resolve(**options: Any) -> ResolvedOptions:
    return GenerationOptions(**options).resolve(GenerationOptions(eos_token_id=[3, 4]))


def process(options: ResolvedOptions, logits: Floats, prompt: list[int], new: list[int]) -> Floats:
    """Apply all processors; they see the ids grow one by one, as in a generation."""
    processors = make_processors(options, prompt)
    for length in range(len(new)):
        before = logits.copy()
        for processor in processors:
            processor(before, [*prompt, *new[:length]], len(prompt))
    found = logits.copy()
    for processor in processors:
        processor(found, [*prompt, *new], len(prompt))
    return found


def random_case(seed: int) -> tuple[Floats, list[int], list[int]]:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=SIZE) * 5).astype(np.float32)
    # Few different ids, so that sequences of them come again.
    return logits, rng.integers(6, size=15).tolist(), rng.integers(6, size=int(rng.integers(0, 20))).tolist()


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
        ({"repetition_penalty": 0.7}, [RepetitionPenaltyLogitsProcessor(0.7)]),
        ({"no_repeat_ngram_size": 1}, [NoRepeatNGramLogitsProcessor(1)]),
        ({"no_repeat_ngram_size": 2}, [NoRepeatNGramLogitsProcessor(2)]),
        ({"no_repeat_ngram_size": 3}, [NoRepeatNGramLogitsProcessor(3)]),
        ({"no_repeat_ngram_size": 40}, [NoRepeatNGramLogitsProcessor(40)]),
        (
            {"bad_words": [[1], [2, 5], [0, 1, 2], [3], [5, 5]]},
            [NoBadWordsLogitsProcessor([[1], [2, 5], [0, 1, 2], [3], [5, 5]], eos_token_id=[3, 4])],
        ),
        ({"suppress_tokens": [0, 7, 59]}, [SuppressTokensLogitsProcessor([0, 7, 59])]),
        ({"logit_bias": {5: 2.5, 0: -3.0}}, [SequenceBiasLogitsProcessor([[[5], 2.5], [[0], -3.0]])]),
        ({"logit_bias": {5: float("-inf")}}, [SequenceBiasLogitsProcessor([[[5], float("-inf")]])]),
        (
            {
                "logit_bias": {5: 2.5}, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words": [[0, 1]],
                "suppress_tokens": [2],
            },
            [
                SequenceBiasLogitsProcessor([[[5], 2.5]]), RepetitionPenaltyLogitsProcessor(1.3),
                NoRepeatNGramLogitsProcessor(2), NoBadWordsLogitsProcessor([[0, 1]], eos_token_id=[3, 4]),
                SuppressTokensLogitsProcessor([2]),
            ],
        ),
    ],
)  # fmt: skip
def test_logits_equal_those_of_transformers(options: dict[str, Any], processors: list[Any]) -> None:
    changed = 0
    for seed in range(60):
        logits, prompt, new = random_case(seed)
        scores = LogitsProcessorList(processors)(torch.tensor([[*prompt, *new]]), torch.from_numpy(logits.copy())[None])
        found = process(resolve(**options), logits, prompt, new)
        np.testing.assert_allclose(found, scores[0].numpy(), rtol=1e-6)
        changed += not np.array_equal(found, logits)
    assert changed or options == {"no_repeat_ngram_size": 40}


def test_min_new_tokens_equals_that_of_transformers() -> None:
    for seed in range(30):
        logits, prompt, new = random_case(seed)
        oracle = MinNewTokensLengthLogitsProcessor(len(prompt), 8, [3, 4], device="cpu")
        scores = oracle(torch.tensor([[*prompt, *new]]), torch.from_numpy(logits.copy())[None])
        np.testing.assert_array_equal(process(resolve(min_new_tokens=8), logits, prompt, new), scores[0].numpy())


def test_presence_and_frequency_count_what_was_generated() -> None:
    logits = np.arange(6, dtype=np.float32)
    found = process(resolve(presence_penalty=1.0, frequency_penalty=0.25), logits, [0, 0, 5], [1, 2, 1, 1, 5])
    assert found.tolist() == [0.0, 1 - 1 - 0.75, 2 - 1 - 0.25, 3.0, 4.0, 5 - 1 - 0.25]
    # Right behind the repetition penalty: that one first.
    both = process(resolve(repetition_penalty=2.0, presence_penalty=1.0), logits, [4], [2])
    assert both.tolist() == [0.0, 1.0, 2 / 2 - 1, 3.0, 4 / 2, 5.0]


def test_the_penalty_makes_a_token_less_likely_whatever_its_sign() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    assert process(resolve(repetition_penalty=2.0), logits, [0, 1, 3], []).tolist() == [1.0, -4.0, 1.0, 0.0]


def test_a_function_of_the_callers_comes_last_and_sees_all_ids() -> None:
    seen = []

    def double(ids: Any, logits: Floats) -> Floats:
        seen.append(ids.tolist())
        assert [ids.dtype, logits.dtype, logits[2]] == [np.int64, np.float32, -np.inf]
        return logits * 2

    options = resolve(logits_processor=[double, lambda ids, logits: logits + 1], suppress_tokens=2)
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    assert process(options, logits, [1, 0], [1]).tolist() == [3.0, 5.0, -np.inf]
    assert seen == [[1, 0], [1, 0, 1]]
    for bad in (lambda ids, logits: logits[:2], lambda ids, logits: None, lambda ids, logits: logits > 0):
        with pytest.raises(OptionError, match="logits_processor returned"):
            process(resolve(logits_processor=bad), np.zeros(4, np.float32), [1], [])
    bad_values: list[Any] = [
        lambda _, logits: logits + np.nan,
        lambda _, logits: logits + np.inf,
        lambda *_: np.full(4, 1e300),
    ]
    for bad in bad_values:
        with pytest.raises(OptionError, match="returned NaN, infinity or more"):
            process(resolve(logits_processor=bad), np.zeros(4, np.float32), [1], [])


@pytest.mark.parametrize("spread", [0.5, 3.0, 20.0])
@pytest.mark.parametrize(
    ("min_p", "typical_p"), [(0.1, 1.0), (0.9, 1.0), (1.0, 1.0), (0.0, 0.2), (0.0, 0.9), (0.05, 0.7)]
)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (30, 0.9)])
def test_min_p_and_typical_p_equal_those_of_transformers(
    spread: float, min_p: float, typical_p: float, top_k: int, top_p: float
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = (rng.normal(size=400) * spread - 90).astype(np.float32)
        warpers: list[Any] = [TemperatureLogitsWarper(0.8)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        warpers += [MinPLogitsWarper(min_p)] if min_p else []
        warpers += [TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
        scores = LogitsProcessorList(warpers)(
            torch.zeros(1, 0, dtype=torch.int64), torch.from_numpy(logits.copy())[None]
        )
        want = torch.softmax(scores, -1)[0].numpy()
        ids, weights = candidates(logits, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
        found = np.zeros(400)
        found[ids] = weights / weights.sum()
        assert (found > 0).tolist() == (want > 0).tolist()
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-7)


def test_no_token_left_says_what_forbids_them() -> None:
    for options in ({"suppress_tokens": range(4)}, {"suppress_tokens": range(4), "seed": 1}):
        resolved = GenerationOptions(**options).resolve(GenerationOptions())
        with pytest.raises(OptionError, match="leave no token to pick"):
            Sampler(resolved, [1], 0).pick(np.zeros(4, np.float32), [1])
