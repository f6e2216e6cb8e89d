"""The options of a form and of a call: what wins, and what gives way."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpt import GenerationOptions
from ortgpt.tasks.options import merged


@pytest.mark.parametrize(
    ("form", "call", "expected"),
    [
        ({"top_k": 2, "stop": "\n"}, {}, {"top_k": 2, "stop": "\n"}),
        ({"top_k": 2}, {"top_k": 5}, {"top_k": 5}),
        ({"top_k": 2}, {"temperature": 0.5, "seed": 1}, {"top_k": 2, "temperature": 0.5, "seed": 1}),
        ({"top_k": 2, "max_new_tokens": 9}, {"do_sample": False}, {"do_sample": False, "max_new_tokens": 9}),
        ({"top_k": 2, "do_sample": True}, {"temperature": 0}, {"temperature": 0}),
        ({"top_k": 2}, {"num_beams": 3}, {"num_beams": 3}),
        ({"do_sample": False}, {"top_p": 0.9}, {"top_p": 0.9}),
        ({"do_sample": False}, {"seed": 3}, {"seed": 3}),
        ({"temperature": 0}, {"do_sample": True}, {"do_sample": True}),
        ({"temperature": 0.7}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7}),
        ({"num_beams": 4, "length_penalty": 2.0, "do_sample": False}, {"seed": 1}, {"seed": 1}),
        ({"num_beams": 4}, {"do_sample": False}, {"num_beams": 4, "do_sample": False}),
        ({"do_sample": False}, {"max_new_tokens": 3}, {"do_sample": False, "max_new_tokens": 3}),
        ({"context_overflow": "slide", "keep_tokens": 4, "slide_tokens": 8}, {"context_overflow": "error"},
         {"context_overflow": "error"}),
        ({"context_overflow": "slide", "keep_tokens": 4, "slide_tokens": 8}, {"context_overflow": "truncate"},
         {"context_overflow": "truncate", "keep_tokens": 4}),
        ({"num_beams": 4, "length_penalty": 2.0}, {"num_beams": 1}, {"num_beams": 1}),
        ({"num_beams": 4, "early_stopping": True}, {"context_overflow": "truncate"}, {"context_overflow": "truncate"}),
        ({"context_overflow": "truncate"}, {"num_beams": 2}, {"num_beams": 2}),
        ({"prompt_lookup_num_tokens": 5}, {"num_beams": 2}, {"num_beams": 2}),
        ({"num_beams": 2}, {"prompt_lookup_num_tokens": 5}, {"prompt_lookup_num_tokens": 5}),
        ({"prompt_lookup_num_tokens": 5}, {"deterministic": True}, {"deterministic": True}),
        ({"num_beams": 2, "top_k": 3}, {"do_sample": False, "context_overflow": "truncate"},
         {"do_sample": False, "context_overflow": "truncate"}),
    ],
)  # fmt: skip
def test_options_of_the_call_win(form: dict[str, Any], call: dict[str, Any], expected: dict[str, Any]) -> None:
    found = merged(GenerationOptions(**form), GenerationOptions(**call))
    assert found == GenerationOptions(**expected)
    found.resolve(GenerationOptions())  # they go together
