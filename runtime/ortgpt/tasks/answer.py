"""Which part of a continuation answers the task: a line, sentences, whole words. Pure functions on texts.

The paper takes "the first 3 generated sentences" and "the first generated sentence"; where a sentence ends is our rule.
"""

from __future__ import annotations

import re

# Letters and digits, with apostrophes and hyphens inside.
WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?:\s+|$)|\n\s*\n")
_BEFORE = re.compile(r"[^\W_]+$")
# A period after one of these, or after a single capital letter, ends no sentence. "I" is the exception.
_ABBREVIATIONS = frozenset(
    {"mr", "mrs", "ms", "messrs", "dr", "prof", "st", "rev", "hon", "col", "capt", "gen", "lt", "jr", "sr", "esq", "vs",
     "vol", "fig"}
)  # fmt: skip


def first_line(text: str) -> str:
    """Return the first line that is not blank, without white space around it."""
    return text.strip().partition("\n")[0].rstrip()


def first_sentences(text: str, count: int) -> str:
    """Return the first `count` sentences, or all where there are fewer: then the last may be cut.

    A sentence ends at . ! ? or … before white space, with closing quotes and brackets, and at an empty line.
    """
    text = text.strip()
    for found in _END.finditer(text):
        word = _BEFORE.search(text[: found.start()])
        if found[0].strip() == "." and word is not None and is_abbreviation(word[0]):
            continue
        count -= 1
        if count == 0:
            return text[: found.end()].rstrip()
    return text


def is_abbreviation(word: str) -> bool:
    """Tell whether a period after a word ends no sentence: after a short title, or a capital letter other than I."""
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


def first_words(text: str, count: int, *, is_whole: bool) -> str:
    """Return the text from the first word to word `count`, or to the last; without `is_whole`, it may end in a part.

    A word that ends with such a text is left out, since more of it may have followed.
    """
    words = [(found.start(), found.end()) for found in WORD.finditer(text)]
    if words and not is_whole and words[-1][1] == len(text):
        words.pop()
    return text[words[0][0] : words[min(count, len(words)) - 1][1]] if words else ""
