"""Constrained output: every whole text is valid, by Python's own parsers; what cannot be whole says so."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt import OptionError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DATE = r"(0[1-9]|[12][0-9]|3[01])/[a-z]{3}(, \d)?"
CHOICES = ["yes", "no", 'per"haps', "日本", "a b\\c"]


@pytest.fixture(params=["native", "portable"])
def generator(
    request: pytest.FixtureRequest, small: ortgpt.Generator, small_portable: ortgpt.Generator
) -> ortgpt.Generator:
    return {"native": small, "portable": small_portable}[request.param]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5}, {"top_k": 2}, {"prompt_lookup_num_tokens": 4}])
def test_every_whole_text_is_valid(generator: ortgpt.Generator, options: dict[str, Any]) -> None:
    whole = 0
    for seed in range(8):
        drawn = options | ({} if options in ({}, {"prompt_lookup_num_tokens": 4}) else {"seed": seed})
        for grammar in (SCHEMA, DATE, CHOICES):
            done = generator.generate("It is", grammar=grammar, max_new_tokens=50, **drawn)
            if done.finish_reason != "stop":
                assert done.finish_reason == "length"
                continue
            whole += 1
            if grammar is DATE:
                assert re.fullmatch(DATE, done.text)
            elif grammar is CHOICES:
                assert done.text in CHOICES
            else:
                value = json.loads(done.text)
                assert set(value) == {"name", "age"}
                assert len(value["name"]) <= 6
                assert 0 <= value["age"] <= 99
    assert whole >= 16


def test_every_choice_can_be_written(small: ortgpt.Generator) -> None:
    """A choice that the model is pushed to, byte by byte, comes out whole."""
    for choice in CHOICES:
        ids = small.tokenizer.encode(choice)

        def push(token_ids: Any, logits: Any, ids: list[int] = ids) -> Any:
            place = len(token_ids) - 2
            if place < len(ids):
                logits[ids[place]] = 1e4
            return logits

        done = small.generate([1, 2], grammar=CHOICES, logits_processor=push, max_new_tokens=20)
        assert (done.text, done.finish_reason) == (choice, "stop")


def test_where_a_text_may_end_and_where_it_has_to(small: ortgpt.Generator) -> None:
    # Nothing may follow: it ends without an end-of-text token.
    done = small.generate("a", grammar="[0-9]{3}", max_new_tokens=20, eos_token_id=[])
    assert (len(done.text), done.finish_reason, done.stop_reason) == (3, "stop", None)
    # It may go on: without end-of-text it does, to the last token that is allowed, and is whole all the same.
    done = small.generate("a", grammar="[0-9]+", max_new_tokens=20, eos_token_id=[])
    assert (done.finish_reason, done.text.isdigit()) == ("stop", True)
    # End-of-text may come only where the text is whole.
    pushed = small.generate(
        "a", grammar="[0-9]{2,}", max_new_tokens=20, eos_token_id=0,
        logits_processor=lambda ids, logits: np.where(np.arange(300) == 0, 1e5, logits),
    )  # fmt: skip
    assert pushed.stop_reason == 0
    assert len(pushed.text) == 2
    # Cut off, it says so.
    assert small.generate("a", grammar="[0-9]{9}", max_new_tokens=2).finish_reason == "length"


def test_bytes_of_a_character_may_be_tokens_of_their_own(small: ortgpt.Generator) -> None:
    done = small.generate("a", grammar="[日本é]{4}", max_new_tokens=20)
    assert re.fullmatch("[日本é]{4}", done.text)


def test_rows_of_a_batch_have_grammars_of_their_own(small: ortgpt.Generator) -> None:
    options = [ortgpt.GenerationOptions(grammar=each, max_new_tokens=12) for each in ("[a-f]{3}", "[0-9]{5}", CHOICES)]
    found = small.generate_batch(["a", "b", "c"], options)
    for prompt, each, row in zip("abc", options, found, strict=True):
        assert row.text == small.generate(prompt, each).text
    assert re.fullmatch("[a-f]{3}", found[0].text)


def test_what_is_no_grammar_is_refused(small: ortgpt.Generator) -> None:
    for grammar, part in (
        ("(", "is not accepted"),
        ({"type": "nonsense"}, "is not accepted"),
        ({"$ref": "http://elsewhere/schema.json"}, "is not accepted"),
        ({"type": {1, 2}}, "is not a JSON schema"),
        ("", "accepted: a regular expression, a JSON schema, or a list of choices"),
        ([], "a list of choices"),
        ([1], "a list of choices"),
        (5, "a list of choices"),
    ):
        with pytest.raises(OptionError, match=part):
            small.generate("a", grammar=grammar)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="min_new_tokens = 5 cannot be combined with a grammar"):
        small.generate("a", grammar="[0-9]+", min_new_tokens=5)
    with pytest.raises(OptionError, match="leave no token"):
        small.generate("a", grammar="[0-9]+", suppress_tokens=range(1, 300))


def test_without_llguidance_the_error_names_the_extra(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llguidance" else find_spec(name, *rest)
    )
    with pytest.raises(OptionError, match=r"pip install .*\[grammar\]"):
        small.generate("a", grammar="b")
