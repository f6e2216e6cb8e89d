"""Rows of an evaluation: what is read of each kind, and each fault by its line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ortgpt import OptionError, PromptError
from ortgpt.tools.evaluation_rows import Row, Rows, read_rows


def read(*lines: object, **options: Any) -> Rows:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read_rows(text, "rows.jsonl", **options)


def test_the_first_row_says_the_kind() -> None:
    assert read({"context": "a", "choices": ["b", "c"], "answer": 1}).kind == "multiple-choice"
    assert read({"context": "a", "target": "b"}).kind == "completion"
    assert read({"text": "a b", "id": 1}).kind == "perplexity"
    assert read({"text": "a b", "target": "x"}, kind="last-word").kind == "last-word"
    for row, what in (({"context": "a"}, "none"), ({"text": "a", "target": "b"}, "several")):
        with pytest.raises(PromptError, match=rf'rows.jsonl line 1 has {what} of the keys .*"choices" for multiple'):
            read(row)


def test_what_is_read() -> None:
    row = {"context": "a", "choices": ["b", "c d"], "answer": "c d"}
    (found,) = read(row).rows
    assert found == Row(line=1, context="a", continuations=[" b", " c d"], choices=["b", "c d"], answer=1)
    (found,) = read(row, delimiter="").rows
    assert found.continuations == ["b", "c d"]
    (found,) = read({"context": "a\n", "target": " b"}, delimiter="").rows
    assert (found.context, found.continuations) == ("a\n", [" b"])
    (found,) = read({"context": "a\n", "target": "b"}, delimiter="-> ").rows
    assert found.continuations == ["-> b"]
    (found,) = read({"text": "one\ntwo  three"}, kind="last-word").rows
    assert (found.context, found.continuations) == ("one\ntwo ", [" three"])
    (found,) = read({"text": " a "}).rows
    assert (found.context, found.continuations, found.choices) == ("", [" a "], [" a "])


def test_lines_keep_their_numbers_and_a_limit_leaves_the_rest_unread() -> None:
    rows = read("", {"text": "a"}, "  ", {"text": "b"}, "not JSON", limit=2).rows
    assert [row.line for row in rows] == [2, 4]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("{", "not JSON"),
        ("[1]", r"\[1\] \(accepted: a JSON object\)"),
        ('{"context": "a", "context": "b"}', "duplicate keys 'context'"),
        ('{"context": "\\ud800", "choices": ["a", "b"], "answer": 0}', "not JSON: .*surrogates not allowed"),
        ({"choices": ["a", "b"], "answer": 0}, 'no "context"'),
        ({"context": 5, "choices": ["a", "b"], "answer": 0}, r"context = 5 \(accepted: a text\)"),
        ({"context": "a", "answer": 0}, r'no "choices" \(accepted: a list of at least two texts'),
        ({"context": "a", "choices": ["b"], "answer": 0}, r"choices = \['b'\] \(accepted"),
        ({"context": "a", "choices": ["b", ""], "answer": 0}, "choices = "),
        ({"context": "a", "choices": ["b", 1], "answer": 0}, "choices = "),
        ({"context": "a", "choices": ["b", "b"], "answer": 0}, "none twice"),
        ({"context": "a", "choices": "bc", "answer": 0}, "choices = 'bc'"),
        ({"context": "a", "choices": ["b", "c"]}, r"no \"answer\" \(accepted: an integer from 0 to 1, or the text"),
        ({"context": "a", "choices": ["b", "c"], "answer": 2}, "answer = 2"),
        ({"context": "a", "choices": ["b", "c"], "answer": -1}, "answer = -1"),
        ({"context": "a", "choices": ["b", "c"], "answer": True}, "answer = True"),
        ({"context": "a", "choices": ["b", "c"], "answer": "d"}, "answer = 'd'"),
        (
            {"context": "a ", "choices": ["b", "c"], "answer": 0},
            "context ends in white space, and the delimiter is ' '",
        ),
        ({"context": "a", "choices": ["b", " c"], "answer": 0}, r"choices\[1\] begins with white space"),
    ],
)
def test_a_fault_is_named_by_its_line(row: object, fault: str) -> None:
    good = {"context": "a", "choices": ["b", "c"], "answer": 0}
    with pytest.raises(PromptError, match=f"^rows.jsonl line 2: .*{fault}"):
        read(good, row, good)


@pytest.mark.parametrize(
    ("kind", "row", "fault"),
    [
        ("completion", {"context": "a"}, 'no "target"'),
        ("completion", {"context": "a", "target": ""}, "target = ''"),
        ("perplexity", {"text": ""}, r"text = '' \(accepted: a text of at least one character\)"),
        ("perplexity", {"context": "a"}, 'no "text"'),
        ("last-word", {"text": "word"}, "text = 'word'"),
        ("last-word", {"text": "two words "}, "a last word, with a space before it and no white space after it"),
        ("last-word", {"text": "two words\n"}, "no white space after it"),
        ("last-word", {"text": "some two\nwords"}, "no white space after it"),
        ("last-word", {"text": "  word"}, "text = '  word'"),
    ],
)
def test_faults_of_the_other_kinds(kind: str, row: object, fault: str) -> None:
    with pytest.raises(PromptError, match=f"rows.jsonl line 1: .*{fault}"):
        read(row, kind=kind)


def test_all_faults_are_named_a_line_each() -> None:
    with pytest.raises(PromptError) as refused:
        read({"text": "a"}, *[{"text": ""}] * 25)
    first, *lines = str(refused.value).splitlines()
    assert first == "rows.jsonl: 25 of 26 rows are at fault"
    assert lines[0] == "line 2: text = '' (accepted: a text of at least one character)"
    assert (len(lines), lines[-1]) == (21, "and 5 more")


def test_bad_options_and_an_empty_file_are_refused() -> None:
    with pytest.raises(OptionError, match=r"kind = 'x' .*multiple-choice"):
        read({"text": "a"}, kind="x")
    with pytest.raises(OptionError, match="delimiter = '' would have no effect on rows of the kind perplexity"):
        read({"text": "a"}, delimiter="")
    with pytest.raises(PromptError, match=r"rows.jsonl has no rows"):
        read("\n \n")
