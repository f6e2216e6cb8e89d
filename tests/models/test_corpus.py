from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ortgpt_models import ModelError
from ortgpt_models.corpus import Corpus, encode_corpus, read_texts, train_tokenizer
from support import TEXT


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    return path


def encoded(paths: list[Path], end_of_text_id: int | None = 0) -> tuple[Corpus, str]:
    """Return the texts as ids of a tokenizer trained on them, and the text of those to train on."""
    texts = read_texts(paths, None)
    tokenizer = train_tokenizer(texts.documents, 300)
    corpus = encode_corpus(texts, lambda text: tokenizer.encode(text).ids, end_of_text_id, 16)
    return corpus, tokenizer.decode(corpus.train_ids.tolist(), skip_special_tokens=True)


def test_without_a_held_out_file_the_end_of_the_text_is_never_trained_on(text: Path) -> None:
    corpus, trained = encoded([text])
    whole = text.read_text(encoding="utf-8")
    assert corpus.held_out_bytes == len(whole[int(len(whole) * 0.95) :].encode())
    assert trained == whole[: int(len(whole) * 0.95)]


def test_the_held_out_end_may_span_several_texts(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the rightful property", encoding="utf-8")
    corpus, trained = encoded([text, other])
    whole = text.read_text(encoding="utf-8") + other.read_text(encoding="utf-8")
    cut = int(len(whole) * 0.95)
    assert corpus.held_out_bytes == len(whole[cut:].encode())
    assert trained == whole[:cut]
    assert corpus.train_ids.tolist().count(0) == 1


def test_end_of_text_ends_each_document_and_begins_the_held_out_text_where_there_is_one(text: Path) -> None:
    other, last = text.with_name("other.txt"), text.with_name("last.txt")
    for path in (other, last):
        path.write_text("abc", encoding="utf-8")
    texts = read_texts([other, other], last)
    ends, none = (encode_corpus(texts, lambda text: [7, 8, 9], end, 4) for end in (5, None))
    assert (ends.train_ids.tolist(), ends.held_out_ids.tolist()) == ([7, 8, 9, 5, 7, 8, 9, 5], [5, 7, 8, 9])
    assert (none.train_ids.tolist(), none.held_out_ids.tolist()) == ([7, 8, 9, 7, 8, 9], [7, 8, 9])


@pytest.mark.parametrize(
    ("end_of_text_id", "window", "train", "held_out", "is_enough"),
    [(0, 5, 5, 1, True), (0, 6, 5, 1, False), (None, 5, 6, 2, True), (None, 5, 5, 2, False), (None, 5, 6, 1, False)],
)
def test_texts_that_are_too_short_are_refused(
    tmp_path: Path, end_of_text_id: int | None, window: int, train: int, held_out: int, is_enough: bool
) -> None:
    paths = [tmp_path / name for name in ("train.txt", "held_out.txt")]
    for path, size in zip(paths, (train, held_out), strict=True):
        path.write_text("a" * size, encoding="utf-8")
    texts = read_texts(paths[:1], paths[1])
    if is_enough:
        encode_corpus(texts, lambda text: [1] * len(text), end_of_text_id, window)
    else:
        with pytest.raises(ModelError, match=rf"are too few \(accepted: more than the window of {window}, and"):
            encode_corpus(texts, lambda text: [1] * len(text), end_of_text_id, window)


def test_a_byte_order_mark_is_not_trained_on(text: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + text.read_bytes())
    assert read_texts([text], text) == read_texts([marked], marked)
    assert torch.equal(encoded([text])[0].train_ids, encoded([marked])[0].train_ids)


def test_texts_of_another_content_have_another_digest(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT, encoding="utf-8")
    digests = {
        read_texts(paths, held_out).sha256
        for paths, held_out in (([text], None), ([text], text), ([text], other), ([text, text], text), ([other], text))
    }
    assert len(digests) == 5
