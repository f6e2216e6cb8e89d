"""The typed keywords are generated from the options, and each option is declared once."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_type_hints

import typed_keywords
from ortgpt import GenerationOptions, Generator
from ortgpt.cli.text import generate
from ortgpt.options.generation_options import OPTIONS
from ortgpt.options.keywords import GenerationKeywords
from ortgpt.options.resolved import ResolvedOptions


def test_the_committed_module_is_what_the_options_give() -> None:
    assert typed_keywords.TARGET.read_text(encoding="utf-8") == typed_keywords.module_text()
    assert get_type_hints(GenerationKeywords).keys() == OPTIONS.keys()


def test_every_option_is_resolved_and_has_a_help() -> None:
    renamed = {"bad_words": "bad_words_ids", "eos_token_id": "eos_token_ids"}
    resolved = {field.name for field in fields(ResolvedOptions)}
    assert {renamed.get(name, name) for name in OPTIONS} - {"pad_token_id"} == resolved - {
        "usual_new_tokens", "least_new_tokens",
    }  # fmt: skip
    doc = inspect.getdoc(GenerationOptions) or ""
    for name, option in OPTIONS.items():
        assert option.help.endswith("."), name
        assert f"{name}: {option.help}" in doc


def test_every_flag_of_an_option_is_on_the_command_line() -> None:
    flags = {flag.name for option in OPTIONS.values() for flag in option.flags}
    shown = {name for parameter in generate.params for name in parameter.opts}
    assert flags <= shown
    assert {name for name, option in OPTIONS.items() if not option.flags} == {
        "logits_processor",
        "cancel",
        "pad_token_id",
    }


def test_every_call_takes_the_keywords() -> None:
    for call in ("generate", "generate_batch", "stream", "agenerate", "astream"):
        keywords = inspect.signature(getattr(Generator, call)).parameters["keywords"]
        assert keywords.annotation == "Unpack[GenerationKeywords]"
