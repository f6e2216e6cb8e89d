"""Strict JSON of integers, whose quick reader has to accept and refuse what the general one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ortgpt import BundleError
from ortgpt.bundle.checked_json import read_json_object

KEYS = st.text(st.sampled_from('"\\/:,{}[] aé\n\x00日👧'), max_size=6)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(KEYS, st.integers())), is_ascii=st.booleans())
@example(pairs=[("a", 1), ("a", 1)], is_ascii=True)
@example(pairs=[("\\", 1), ('\\"', 2), ('"', 3), ('"', 3)], is_ascii=True)
def test_keys_of_integers_are_read_once_each(tmp_path: Path, pairs: list[tuple[str, int]], is_ascii: bool) -> None:
    path = tmp_path / "vocab.json"
    items = (f"{json.dumps(key, ensure_ascii=is_ascii)}: {value}" for key, value in pairs)
    path.write_text("{" + ", ".join(items) + "}", encoding="utf-8", newline="")
    if len(dict(pairs)) == len(pairs):
        assert list(read_json_object(path, is_flat=True).items()) == pairs
    else:
        with pytest.raises(BundleError, match="duplicate keys"):
            read_json_object(path, is_flat=True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1, "b": {"c": 2, "c": 2}}', "duplicate keys 'c'"),
        ('{"a": "b", "a": "b"}', "duplicate keys 'a'"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"\\ud83d": 1}', "surrogates not allowed"),
        ("[1]", "holds a JSON list"),
        ('{"a": 1', "not readable JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not readable JSON"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "more than 100 lists and objects"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "more than 100 lists and objects"),
    ],
)
def test_other_texts_have_the_faults_of_the_general_reader(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(text)
    for is_flat in (True, False):
        with pytest.raises(BundleError, match=fault):
            read_json_object(path, is_flat=is_flat)


def test_values_that_are_no_integers_are_read_as_by_the_general_reader(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    values = {"a": True, "b": 1.5, "c": None, "d": ["x"], "e": {"f": "g"}}
    path.write_text(json.dumps(values))
    assert read_json_object(path, is_flat=True) == values
