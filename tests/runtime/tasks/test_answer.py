"""What is taken from a continuation, by hand-made continuations."""

from __future__ import annotations

import pytest

from ortgpt.tasks.answer import first_line, first_sentences, first_words


@pytest.mark.parametrize(
    ("text", "line"),
    [(" Rome\nQ: What", "Rome"), ("\n\n  Rome \n", "Rome"), ("", ""), ("\n \n", ""), (" a b", "a b")],
)
def test_the_first_line_that_is_not_blank(text: str, line: str) -> None:
    assert first_line(text) == line


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (" One. Two! Three? Four.", 3, "One. Two! Three?"),
        (" One. Two", 1, "One."),
        (" One. Two", 3, "One. Two"),
        ("Mr. Darcy came. He sat.", 1, "Mr. Darcy came."),
        ("Mrs. J. Bennet saw St. Paul. She left.", 1, "Mrs. J. Bennet saw St. Paul."),
        ("It was I. He left.", 1, "It was I."),
        ("Is he “here?” She asked.", 1, "Is he “here?”"),
        ('"Yes." (Or no.) Then', 2, '"Yes." (Or no.)'),
        ("It cost 3.50 in all. More.", 1, "It cost 3.50 in all."),
        ("Wait... what?! No.", 2, "Wait... what?!"),
        ("A heading\n\nA text. Another.", 1, "A heading"),
        ("One.\n\nTwo.\n \n\nThree. Four.", 3, "One.\n\nTwo.\n \n\nThree."),
        ("\n\nLines\nof one sentence. Next.", 1, "Lines\nof one sentence."),
        ("", 2, ""),
    ],
)
def test_the_first_sentences(text: str, count: int, expected: str) -> None:
    assert first_sentences(text, count) == expected


@pytest.mark.parametrize(
    ("text", "count", "is_whole", "expected"),
    [
        (' "Paris", in Fra', 1, False, "Paris"),
        (" Paris, in Fra", 3, False, "Paris, in"),
        (" Paris, in Fra", 3, True, "Paris, in Fra"),
        (" Jean-Luc d'Arc’s hat", 2, True, "Jean-Luc d'Arc’s"),
        (" Par", 1, False, ""),
        (" Par", 1, True, "Par"),
        (" Par.", 1, False, "Par"),
        ("...", 2, True, ""),
    ],
)
def test_the_first_words(text: str, count: int, is_whole: bool, expected: str) -> None:
    assert first_words(text, count, is_whole=is_whole) == expected
