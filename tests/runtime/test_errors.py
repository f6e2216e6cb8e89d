"""Errors: their messages, in Python and on the command line, through files and between processes."""

from __future__ import annotations

import pickle
import threading

import pytest

from ortgpt import ContextLengthError, GenerationOptions, OptionError
from ortgpt.cli.options import flag_mention
from ortgpt.errors import listed, shown


def error_of(**options: object) -> OptionError:
    with pytest.raises(OptionError) as caught:
        GenerationOptions(**options).resolve(GenerationOptions())  # type: ignore[arg-type]
    return caught.value


def test_an_error_mentions_options_by_the_names_of_its_interface() -> None:
    error = error_of(top_k=5, do_sample=False)
    assert str(error) == "top_k = 5 would have no effect with do_sample = False: remove it, or turn sampling on"
    assert error.worded(flag_mention).startswith("--top-k = 5 would have no effect with --greedy")
    error = error_of(echo=True)
    assert error.worded(flag_mention) == "--echo = True would have no effect without --logprobs"
    assert OptionError.bad_value("turns", 9, "1 to 2").worded(flag_mention) == "turns = 9 (accepted: 1 to 2)"
    assert (
        OptionError.bad_value("threads", 0, "1 or more").worded(flag_mention) == "--threads = 0 (accepted: 1 or more)"
    )


def test_values_with_braces_and_percent_signs_are_shown_as_they_are() -> None:
    for value in ("{}", "{0}", "{top_k.name}", "%s"):
        assert str(error_of(temperature=value)) == f"temperature = {value!r} (accepted: a number from 0 to 1e30)"
        assert str(error_of(temperature=value).at(f"{value} line 3")).startswith(f"{value} line 3: temperature = ")
        assert str(OptionError(f"no file {value}").at("here")) == f"here: no file {value}"


def test_an_error_at_a_place_still_mentions_its_options() -> None:
    error = error_of(top_k=-1).at("in.jsonl line 2")
    assert str(error) == "in.jsonl line 2: top_k = -1 (accepted: an integer of 0 or more)"
    assert error.worded(flag_mention) == "in.jsonl line 2: --top-k = -1 (accepted: an integer of 0 or more)"
    assert str(ContextLengthError("too long").at("line 1")) == "line 1: too long"


def test_errors_pass_between_processes_whatever_their_options_were() -> None:
    event = threading.Event()  # cannot be pickled
    error = OptionError.bad_value("cancel", event, "{none}")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is OptionError
    assert str(again) == str(error) == f"cancel = {shown(event)} (accepted: {{none}})"
    assert repr(again) == f"OptionError({str(error)!r})"


def test_long_values_and_lists_are_cut() -> None:
    assert len(shown("x" * 1000)) == 80
    assert listed([str(number) for number in range(25)]).endswith("; 19; and 5 more")
