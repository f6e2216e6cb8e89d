"""Make labelled sets from a folder of novels by rule: `python benchmarks/novel_sets.py NOVELS -o SETS`.

NOVELS has UTF-8 files *.txt with blank lines between paragraphs; each file is a novel. Each set is a file of JSON lines
for `ortgpt finetune`:

- novel.jsonl, classification: which novel a paragraph is from;
- dialogue.jsonl, classification: whether a paragraph begins with somebody speaking; its quotation marks are taken out;
- follows.jsonl, entailment: whether the second paragraph follows the first, or is another one of the same novel;
- same.jsonl, similarity: whether two paragraphs are from the same novel;
- next.jsonl, multiple-choice: which of three paragraphs of a novel follows another.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_MIN_LETTERS, _MAX_LETTERS = 80, 600
_QUOTES = re.compile('["“”]')

Row = Mapping[str, Any]
Novels = Mapping[str, Sequence[str]]


def read_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a text that have 80 to 600 letters, in order, each in one line."""
    text = path.read_text(encoding="utf-8-sig")
    paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    return [each for each in paragraphs if _MIN_LETTERS <= len(each) <= _MAX_LETTERS]


def novel_rows(novels: Novels, draw: random.Random) -> Iterator[Row]:
    """Yield paragraphs with the name of their novel."""
    while True:
        name = draw.choice([*novels])
        yield {"text": draw.choice(novels[name]), "label": name}


def dialogue_rows(novels: Novels, draw: random.Random) -> Iterator[Row]:
    """Yield paragraphs with whether they begin with a quotation mark, and without all of these."""
    while True:
        text = draw.choice(novels[draw.choice([*novels])])
        label = "dialogue" if _QUOTES.match(text) else "narration"
        yield {"text": _QUOTES.sub("", text), "label": label}


def follows_rows(novels: Novels, draw: random.Random) -> Iterator[Row]:
    """Yield two paragraphs of a novel with whether the second follows the first."""
    while True:
        paragraphs = novels[draw.choice([*novels])]
        place = draw.randrange(len(paragraphs) - 1)
        follows = draw.random() < 0.5
        second = paragraphs[place + 1] if follows else draw.choice([*paragraphs[:place], *paragraphs[place + 2 :]])
        yield {"premise": paragraphs[place], "hypothesis": second, "label": "follows" if follows else "does not"}


def same_rows(novels: Novels, draw: random.Random) -> Iterator[Row]:
    """Yield two paragraphs with whether they are from the same novel."""
    while True:
        first, other = draw.sample([*novels], 2)
        same = draw.random() < 0.5
        second = first if same else other
        label = "same" if same else "different"
        yield {"text": draw.choice(novels[first]), "text_pair": draw.choice(novels[second]), "label": label}


def next_rows(novels: Novels, draw: random.Random) -> Iterator[Row]:
    """Yield a paragraph with three others of its novel, one of which follows it."""
    while True:
        paragraphs = novels[draw.choice([*novels])]
        place = draw.randrange(len(paragraphs) - 1)
        choices = [paragraphs[place + 1], *draw.sample(paragraphs, 2)]
        draw.shuffle(choices)
        if len({*choices}) == 3:
            yield {"context": paragraphs[place], "choices": choices, "answer": choices.index(paragraphs[place + 1])}


SETS = {
    "novel": novel_rows, "dialogue": dialogue_rows, "follows": follows_rows, "same": same_rows, "next": next_rows,
}  # fmt: skip


def distinct(rows: Iterator[Row], count: int) -> list[Row]:
    """Return `count` rows that differ in more than their label; fewer where there are no more."""
    found: dict[str, Row] = {}
    for row, _ in zip(rows, range(20 * count), strict=False):
        key = json.dumps([value for name, value in row.items() if name not in ("label", "answer")])
        found.setdefault(key, row)
        if len(found) == count:
            break
    return [*found.values()]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("novels", type=Path, help="a folder of *.txt, each a novel")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write the sets into")
    parser.add_argument("--rows", type=int, default=600, help="rows of each set (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: %(default)s)")
    options = parser.parse_args()
    novels = {path.stem: read_paragraphs(path) for path in sorted(options.novels.glob("*.txt"))}
    short = [name for name, paragraphs in novels.items() if len(paragraphs) < 3]
    if len(novels) < 2 or short:
        sys.exit(f"{options.novels} has {len(novels)} novels, too short: {short} (accepted: two or more *.txt)")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, make in SETS.items():
        rows = distinct(make(novels, random.Random(options.seed)), options.rows)
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}  {len(rows):,} rows")


if __name__ == "__main__":
    main()
