"""What a classifier reads, token by token: templates, both orders, choices, and what is cut where it is too long."""

from __future__ import annotations

from typing import Any

import pytest

from ortgpt.bundle.manifest import PairTemplate, Template
from ortgpt.classifier_input import InputReader, is_pair
from ortgpt.errors import ContextLengthError, PromptError
from ortgpt.task_rows import read_row

TEMPLATE = Template(before=(100,), after=(102,), pair=PairTemplate(before=(100,), between=(101,), after=(102,)))


class Letters:
    """A tokenizer with a token for each letter: a is 1, b is 2 and so on."""

    kind = "byte-level-bpe"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text]


def reader(
    task: str | None = None, *, n_positions: int = 8, cuts: bool = False, template: Any = TEMPLATE
) -> InputReader:
    letters: Any = Letters()
    return InputReader(
        letters,
        template=template,
        finetuning_task=task,
        labels_tokens=False,
        limit=30,
        n_positions=n_positions,
        cuts=cuts,
    )


def test_texts_stand_inside_their_templates() -> None:
    single = reader().read("abc", "text")
    assert (single.rows, single.places, single.cut) == ([[100, 1, 2, 3, 102]], range(1, 4), 0)
    assert reader().read(("ab", "c"), "text").rows == [[100, 1, 2, 101, 3, 102]]
    assert reader("similarity").read(("ab", "c"), "text").rows == [[100, 1, 2, 101, 3, 102], [100, 3, 101, 1, 2, 102]]
    assert reader().read([5, 6], "text").rows == [[5, 6]], "ids are taken as they are"
    assert reader(template=None).read("ab", "text").rows == [[1, 2]]
    choices = reader("multiple-choice").read_choices("a", ["bc", "d"], "row")
    assert (choices.rows, choices.choices) == ([[100, 1, 101, 2, 3, 102], [100, 1, 101, 4, 102]], ("bc", "d"))


@pytest.mark.parametrize(
    ("text", "rows", "cut"),
    [
        ("abcdef", [[100, 1, 2, 3, 4, 5, 6, 102]], 0),
        ("abcdefgh", [[100, 1, 2, 3, 4, 5, 6, 102]], 2),
        (("abc", "de"), [[100, 1, 2, 3, 101, 4, 5, 102]], 0),
        (("abcdef", "z"), [[100, 1, 2, 3, 4, 101, 26, 102]], 2),
        (("z", "abcdef"), [[100, 26, 101, 1, 2, 3, 4, 102]], 2),
        (("abcdef", "uvwxyz"), [[100, 1, 2, 3, 101, 21, 22, 102]], 7),
        (("abcde", "wxyz"), [[100, 1, 2, 3, 101, 23, 24, 102]], 4),
        (("wxyz", "abcde"), [[100, 23, 24, 101, 1, 2, 3, 102]], 4),
    ],
    ids=str,
)
def test_what_is_too_long_loses_the_end_of_its_longer_text(text: Any, rows: list[list[int]], cut: int) -> None:
    found = reader(cuts=True).read(text, "text")
    assert (found.rows, found.cut) == (rows, cut)
    if cut:
        with pytest.raises(ContextLengthError, match=rf"text has {8 + cut} tokens, more than the model's context of 8"):
            reader().read(text, "text")


def test_a_context_with_choices_loses_its_beginning() -> None:
    found = reader("multiple-choice", cuts=True).read_choices("abcdef", ["yz", "x"], "row")
    assert (found.rows, found.cut) == ([[100, 4, 5, 6, 101, 25, 26, 102], [100, 4, 5, 6, 101, 24, 102]], 3)
    with pytest.raises(ContextLengthError, match="row has 9 tokens"):
        reader("multiple-choice", cuts=True).read_choices("a", ["uvwxyz", "x"], "row")


def test_ids_and_a_context_too_small_for_the_template_are_not_cut() -> None:
    with pytest.raises(ContextLengthError):
        reader(cuts=True).read([1] * 9, "text")
    with pytest.raises(ContextLengthError, match="text has 3 tokens"):
        reader(cuts=True, n_positions=2).read(("a", "b"), "text")


def test_a_pair_is_a_tuple_of_texts() -> None:
    assert is_pair(("a", "b"))
    for other in (["a", "b"], ("a",), (1, 2), ("a", 2), "ab"):
        assert not is_pair(other)


@pytest.mark.parametrize(
    ("row", "text", "rest"),
    [
        ({"text": "a", "id": 1}, "a", {"id": 1}),
        ({"prompt": "a"}, "a", {}),
        ({"text_pair": "b", "text": "a", "label": 1}, ("a", "b"), {"label": 1}),
        ({"premise": "a", "hypothesis": "b"}, ("a", "b"), {}),
        ({"sentence1": "a", "sentence2": "b"}, ("a", "b"), {}),
    ],
    ids=str,
)
def test_rows_of_each_form(row: dict[str, Any], text: Any, rest: dict[str, Any]) -> None:
    found = read_row(row)
    assert (found.text, found.rest, found.has_choices) == (text, rest, False)
    assert found.is_pair == isinstance(text, tuple)


def test_a_row_with_choices() -> None:
    found = read_row({"context": "a", "choices": ["b"], "answer": 0})
    assert (found.context, found.choices, found.rest, found.has_choices) == ("a", ["b"], {"answer": 0}, True)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no text"),
        ({"id": 1}, "no text"),
        ({"text": "a", "prompt": "b"}, "text, prompt together"),
        ({"text_pair": "a"}, "text_pair alone"),
        ({"text": "a", "hypothesis": "b"}, "text, hypothesis together"),
        ({"text": "a", "text_pair": "b", "prompt": "c"}, "text, prompt, text_pair together"),
        ({"context": "a"}, "context alone"),
        ({"text": "a", "choices": ["b"]}, "text, choices together"),
    ],
    ids=str,
)
def test_rows_of_no_form_or_of_several_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(PromptError, match=rf"{reason} \(accepted: an object with "):
        read_row(row)
