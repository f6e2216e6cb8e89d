from __future__ import annotations

import logging
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ortgpt import GenerationOptions, OptionError, OrtGptError, UnknownOptionError
from ortgpt.options.generation_config import read_generation_config
from ortgpt.options.resolved import ResolvedOptions

NO_DEFAULTS = GenerationOptions(eos_token_id=0)


def resolve(defaults: GenerationOptions = NO_DEFAULTS, **keywords: Any) -> ResolvedOptions:
    return GenerationOptions.make(None, keywords).resolve(defaults)


@pytest.mark.parametrize(
    ("keywords", "samples"),
    [
        ({}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "do_sample": False}, False),
        ({"temperature": 1.0}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"seed": 0}, True),
        ({"do_sample": True}, True),
    ],
)
def test_what_turns_sampling_on(keywords: dict[str, Any], samples: bool) -> None:
    assert resolve(**keywords).do_sample is samples


def test_defaults_are_the_documented_ones() -> None:
    assert resolve() == ResolvedOptions(
        do_sample=False, temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0, max_new_tokens=None,
        usual_new_tokens=128, least_new_tokens=1, min_new_tokens=0, stop=(), eos_token_ids=frozenset({0}), seed=None,
        min_p=0.0, typical_p=1.0, presence_penalty=0.0, frequency_penalty=0.0, no_repeat_ngram_size=0,
        bad_words_ids=(), suppress_tokens=frozenset(), logit_bias={}, logits_processor=(), grammar=None,
        timeout_s=None, cancel=None, num_return_sequences=1, num_beams=1, length_penalty=1.0, early_stopping=False,
        logprobs=None, echo=False, context_overflow="error", keep_tokens=0, slide_tokens=None,
        prompt_lookup_num_tokens=None, assistant_model=None, num_assistant_tokens=5, deterministic=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"temperature": -0.1}, ["temperature = -0.1", "0 to 1e30"]),
        ({"temperature": math.nan}, ["temperature = nan"]),
        ({"temperature": math.inf}, ["temperature = inf"]),
        ({"top_p": 1.01}, ["top_p = 1.01", "0 to 1"]),
        ({"top_k": -1}, ["top_k = -1"]),
        ({"top_k": 2.5}, ["top_k = 2.5", "integer"]),
        ({"repetition_penalty": 0}, ["repetition_penalty = 0", "0.001 to 1000"]),
        ({"repetition_penalty": 1e-40}, ["repetition_penalty = 1e-40"]),
        ({"max_new_tokens": 0}, ["max_new_tokens = 0", "1 or more"]),
        ({"max_new_tokens": True}, ["max_new_tokens = True"]),
        ({"min_new_tokens": -1}, ["min_new_tokens = -1"]),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens = 9", "max_new_tokens = 8"]),
        ({"min_new_tokens": 9, "eos_token_id": []}, ["min_new_tokens = 9", "no effect"]),
        ({"stop": ""}, ["stop = ''", "at least one character"]),
        ({"stop": ["a", ""]}, ["stop = ['a', '']"]),
        ({"stop": 5}, ["stop = 5"]),
        ({"eos_token_id": -1}, ["eos_token_id = -1"]),
        ({"eos_token_id": "x"}, ["eos_token_id = 'x'"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"seed": []}, ["seed = []"]),
        ({"do_sample": 1}, ["do_sample = 1", "true or false"]),
        ({"temperature": 1e39}, ["temperature = 1e+39"]),
        ({"stop": "\ud800"}, ["stop = ", "whole characters"]),
        ({"bad_words": ["a", "\ud800"]}, ["bad_words = "]),
        ({"grammar": ["\ud800"]}, ["grammar = "]),
        ({"logit_bias": {5: 1e300}}, ["logit_bias = ", "1e30"]),
        ({"context_overflow": np.array(["slide", "x"])}, ["context_overflow = "]),
        ({"do_sample": False, "top_k": 5}, ["top_k = 5", "no effect", "do_sample = False"]),
        ({"temperature": 0, "top_p": 0.5, "seed": 1}, ["top_p = 0.5", "seed = 1", "temperature = 0"]),
        ({"temperature": 0, "do_sample": True}, ["temperature = 0", "do_sample = True"]),
    ],
)
def test_bad_and_ineffective_values_name_option_value_and_what_is_accepted(
    keywords: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        resolve(**keywords)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)


def test_neutral_values_are_no_requests() -> None:
    """What wrappers pass that always pass everything."""
    found = resolve(
        echo=False, keep_tokens=0, num_beams=1, length_penalty=1.0, early_stopping=False, do_sample=np.False_
    )
    assert found == resolve()


def test_arrays_without_axes_are_their_values() -> None:
    found = resolve(
        eos_token_id=np.array(3), seed=np.array(5), stop=np.array("x"), top_p=np.array(0.5), do_sample=np.array(True)
    )
    assert [found.eos_token_ids, found.seed, found.stop, found.top_p] == [{3}, 5, ("x",), 0.5]


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(
        UnknownOptionError, match=r"^unknown option topk, temprature; did you mean top_k, temperature\?$"
    ) as caught:
        GenerationOptions.make(None, {"topk": 1, "temprature": 2})
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, OrtGptError)
    with pytest.raises(UnknownOptionError, match=r"unknown option topk, zzz; did you mean top_k\? \(accepted: do_sa"):
        GenerationOptions.make(None, {"topk": 1, "zzz": 2})
    with pytest.raises(OptionError, match="GenerationOptions"):
        GenerationOptions.make({"top_k": 1}, {})  # type: ignore[arg-type]


def test_keywords_win_over_the_object_and_the_object_over_the_bundle() -> None:
    bundle = GenerationOptions(do_sample=True, temperature=0.5, top_k=7, max_new_tokens=9, eos_token_id=3)
    options = GenerationOptions(temperature=0.6, top_p=0.9)
    found = GenerationOptions.make(options, {"top_p": 0.8}).resolve(bundle)
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (True, 0.6, 0.8, 7)
    assert (found.max_new_tokens, found.usual_new_tokens) == (None, 9)
    assert found.eos_token_ids == {3}


def test_defaults_of_the_bundle_give_way_silently() -> None:
    bundle = GenerationOptions(do_sample=True, temperature=0.5, top_k=7)
    assert resolve(bundle).do_sample is True
    assert resolve(bundle, do_sample=False).do_sample is False
    assert resolve(bundle, temperature=0).do_sample is False
    assert resolve(GenerationOptions(temperature=0.5)).do_sample is False  # only do_sample itself turns it on there
    assert resolve(GenerationOptions(temperature=0.0), seed=1).temperature == 1.0


def test_default_length_is_what_the_context_leaves() -> None:
    options = resolve()
    assert options.new_tokens_for(10, 1024) == 128
    assert options.new_tokens_for(1000, 1024) == 24
    assert options.new_tokens_for(2000, 1024) == 1
    assert resolve(max_new_tokens=500).new_tokens_for(10, 64) == 500
    bundle = GenerationOptions(max_new_tokens=60, min_new_tokens=60, eos_token_id=0)
    assert [resolve(bundle).new_tokens_for(prompt, 64) for prompt in (3, 10)] == [60, 54]
    assert resolve(bundle, max_new_tokens=5).new_tokens_for(10, 64) == 5
    assert resolve(min_new_tokens=200).new_tokens_for(10, 1024) == 200
    assert resolve(min_new_tokens=60).new_tokens_for(10, 64) == 60  # which does not fit, as the engine will say


def test_seeds_by_row() -> None:
    assert resolve(seed=5).seeds_for(3) == [5, 5, 5]
    assert resolve(seed=[1, 2, 3]).seeds_for(3) == [1, 2, 3]
    assert resolve().seeds_for(2) == [None, None]
    assert resolve(seed=np.array([4, 5])).seeds_for(2) == [4, 5]
    for seeds in ((1, 2), np.array([1, 2]), iter([1, 2])):
        with pytest.raises(OptionError, match="seed has 2 values for 3 rows"):
            resolve(seed=seeds).seeds_for(3)


def test_lists_arrays_and_generators_are_read_once() -> None:
    for stop in (["a", "b"], ("a", "b"), iter(["a", "b"]), (text for text in "ab")):
        assert resolve(stop=stop).stop == ("a", "b")
    for eos in ([1, 2], np.array([1, 2]), (token_id for token_id in (1, 2)), {1, 2}):
        assert resolve(eos_token_id=eos).eos_token_ids == {1, 2}
    options = GenerationOptions(stop=(text for text in "ab"))
    assert [options.resolve(NO_DEFAULTS).stop for _ in range(2)] == [("a", "b")] * 2
    assert resolve(stop=[], eos_token_id=[]).eos_token_ids == frozenset()


def test_numbers_of_any_kind_become_pythons_own() -> None:
    found = resolve(
        top_k=np.int8(4), temperature=np.float32(0.5), seed=np.int32(1), top_p=Fraction(1, 2),
        max_new_tokens=np.uint8(200), eos_token_id=np.array([7], np.uint8),
    )  # fmt: skip
    values = (found.top_k, found.temperature, found.seed, found.top_p, found.max_new_tokens, *found.eos_token_ids)
    assert values == (4, 0.5, 1, 0.5, 200, 7)
    assert [type(value) for value in values] == [int, float, int, float, int, int]
    assert found.new_tokens_for(100, 1024) == 200


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400), "0.5", 1j, np.nan])
def test_numbers_beyond_any_float_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name} = "):
        GenerationOptions(**{name: value})


def test_large_integers_are_integers() -> None:
    assert resolve(seed=2**100).seeds_for(1) == [2**100]
    assert resolve(top_k=2**70).top_k == 2**70


def test_generation_config_supplies_defaults_and_names_what_it_cannot(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "_from_model_config": True, "transformers_version": "5.0", "bos_token_id": 1, "eos_token_id": [1, 2],
        "do_sample": True, "temperature": 0.7, "num_beams": 4, "top_p": None, "length_penalty": 1.0,
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = read_generation_config(values, (9,))
    assert found == GenerationOptions(do_sample=True, temperature=0.7, eos_token_id=(1, 2))
    assert "num_beams = 4" in caplog.text
    assert "transformers_version" not in caplog.text
    assert "length_penalty" not in caplog.text
    assert read_generation_config({}, (9,)).eos_token_id == (9,)
