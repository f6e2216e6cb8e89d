"""Measure `ortgpt task` on a book that the model has not seen: last words, and labels, beside the trivial baseline.

`python benchmarks/tasks.py BUNDLE BOOK.txt` takes passages by rule. Last words: the sentences of a paragraph up to one
of at least 50 words in all, whose last word is no stop word of the form. The form `cloze` is compared with one without
stop words, one without `ends` too (the likeliest next word), and the commonest last word. Labels: the passage before
each "his own" or "her own"; the form tells which of the two follows, and is compared with the commoner one.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from pathlib import Path

import ortgpt
from ortgpt.tasks import TaskForm, read_form, run_task_batch
from ortgpt.tasks.answer import WORD, first_sentences

_MIN_WORDS = 50
_MAX_WORDS = 120  # with the tokens of `austen`, they fit its context of 256
_OWN = {"his": " his own", "her": " her own"}


def passages(book: str, stop_words: frozenset[str]) -> list[tuple[str, str]]:
    """Return passages without their last word, and that word: at most one of each paragraph."""
    found = []
    for paragraph in re.split(r"\n\s*\n", book):
        rest, passage = " ".join(paragraph.split()), ""
        while rest and len(passage.split()) < _MIN_WORDS:
            sentence = first_sentences(rest, 1)
            passage, rest = f"{passage} {sentence}".strip(), rest[len(sentence) :].strip()
        last = re.fullmatch(rf"(.* )({WORD.pattern})[.!?]", passage)
        if _MIN_WORDS <= len(passage.split()) <= _MAX_WORDS and last and last[2].lower() not in stop_words:
            found.append((last[1], last[2]))
    return found


def before_own(book: str) -> list[tuple[str, str]]:
    """Return what precedes each "his own" or "her own" in its paragraph, and which of the two it is."""
    found = []
    for paragraph in re.split(r"\n\s*\n", book):
        text = " ".join(paragraph.split())
        for own in re.finditer(r" (his|her) own\b", text):
            before = text[: own.start()].split()
            if len(before) >= 10:
                found.append((" ".join(before[-_MAX_WORDS:]), own[1]))
    return found


def measure_words(generator: ortgpt.Generator, book: str) -> None:
    form = read_form("cloze")
    found = passages(book, form.answer.stop_words)
    words = [word for _, word in found]
    (common, times), *_ = Counter(words).most_common()
    print(f"last words of {len(found)} passages")
    show(f"always {common!r}", times, len(found))
    ends, stop_words = [*form.answer.ends], [*form.answer.stop_words]
    for name, answer in (
        ("the likeliest next word", {}),
        ("the same, no stop words", {"stop_words": stop_words}),
        ("the likeliest that ends the sentence", {"ends": ends}),
        ("the same, no stop words (cloze)", {"ends": ends, "stop_words": stop_words}),
    ):
        values = {"description": name, "prompt": "{text}", "answer": {"kind": "last_word", **answer}}
        started = time.perf_counter()
        results = run_task_batch(generator, TaskForm.from_dict(values, name=name), [text for text, _ in found])
        seconds = (time.perf_counter() - started) / len(found)
        right = sum(result.answer == word for result, word in zip(results, words, strict=True))
        sure = sum(result.is_likeliest is True for result in results)
        show(name, right, len(found), f"{sure} certain to be the likeliest, {seconds:.2f} s each")


def measure_labels(generator: ortgpt.Generator, book: str) -> None:
    found = before_own(book)
    labels = [label for _, label in found]
    (common, times), *_ = Counter(labels).most_common()
    print(f"labels of {len(found)} passages")
    show(f"always {common!r}", times, len(found))
    answer = {"kind": "label", "labels": _OWN}
    form = TaskForm.from_dict({"description": "his or her", "prompt": "{text}", "answer": answer})
    results = run_task_batch(generator, form, [text for text, _ in found])
    show("classify", sum(result.answer == label for result, label in zip(results, labels, strict=True)), len(found))


def show(name: str, right: int, count: int, more: str = "") -> None:
    share = right / count
    print(f"  {name:<38} {share:6.1%} ± {math.sqrt(share * (1 - share) / count):.1%}   {more}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("book", type=Path)
    args = parser.parse_args()
    book = args.book.read_text(encoding="utf-8")
    with ortgpt.load(args.bundle) as generator:
        measure_words(generator, book)
        measure_labels(generator, book)


if __name__ == "__main__":
    main()
