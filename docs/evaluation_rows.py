"""Make rows for `ortgpt eval` from a novel: `python docs/evaluation_rows.py NOVEL.txt FOLDER`.

A paragraph is what blank lines surround. Of its first three sentences:
- last-word.jsonl: they are a text, without the last full stop, whose last word has four letters or more;
- choice.jsonl: two are a context, and the third stands beside the third one of a paragraph far away;
- perplexity.jsonl: every paragraph of 40 words or more is a text.

Writes at most 500 rows of each, and says how far one gets without a model.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_ROWS = 500
Row = dict[str, Any]


def paragraphs_of(text: str) -> list[str]:
    """Return the paragraphs of 40 words or more, each in one line."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return [paragraph for paragraph in paragraphs if len(paragraph.split()) >= 40]


def beginnings_of(paragraphs: Sequence[str]) -> list[list[str]]:
    """Return the first three sentences of each paragraph that has so many, of at most 150 words in all."""
    sentences = [re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[:3] for paragraph in paragraphs]
    return [three for three in sentences if len(three) == 3 and len(" ".join(three).split()) <= 150]


def last_words(beginnings: Sequence[list[str]]) -> list[Row]:
    """Return the texts whose last word is to be found."""
    texts = [" ".join(three).removesuffix(".") for three in beginnings]
    return [{"text": text} for text in texts if re.search(r" [A-Za-z]{4,}$", text)][:MAX_ROWS]


def choices(beginnings: Sequence[list[str]]) -> list[Row]:
    """Return contexts with the sentence that follows and one that does not; half of the answers are the first."""
    rows: list[Row] = []
    for place, (one, two, three) in enumerate(beginnings[:MAX_ROWS]):
        other = beginnings[(place + len(beginnings) // 2) % len(beginnings)][2]
        pair = [three, other] if place % 2 == 0 else [other, three]
        rows.append({"context": f"{one} {two}", "choices": pair, "answer": place % 2})
    return rows


def report(rows: dict[str, list[Row]]) -> None:
    """Say what one gets without a model: by the most frequent word, the shorter sentence, and a compressor."""
    words = Counter(row["text"].split()[-1] for row in rows["last-word"])
    word, count = words.most_common(1)[0]
    print(f"last-word: {len(rows['last-word'])} rows; '{word}' is right in {count / words.total():.2%}")
    shorter = [min(row["choices"], key=len) == row["choices"][row["answer"]] for row in rows["choice"]]
    print(f"choice: {len(shorter)} rows; the shorter sentence is right in {sum(shorter) / len(shorter):.2%}")
    data = "\n".join(row["text"] for row in rows["perplexity"]).encode()
    bits = 8 * len(lzma.compress(data, preset=9)) / len(data)
    print(f"perplexity: {len(rows['perplexity'])} rows; xz takes {bits:.3f} bits for each byte")


def main(novel: str, folder: str) -> None:
    """Write the three files."""
    paragraphs = paragraphs_of(Path(novel).read_text(encoding="utf-8"))
    beginnings = beginnings_of(paragraphs)
    rows = {
        "last-word": last_words(beginnings),
        "choice": choices(beginnings),
        "perplexity": [{"text": paragraph} for paragraph in paragraphs[:MAX_ROWS]],
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, values in rows.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values)
        (Path(folder) / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    report(rows)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
