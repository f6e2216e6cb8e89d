"""Text to ids and back, against `transformers`' GPT-2 tokenizer."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AddedToken, GPT2Tokenizer

from ortgpt import BundleError, PromptError
from ortgpt.text import byte_level_bpe as module
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt_exporter.checkpoint.load import find_folder
from support import TEXT, read_pairs, write_real_tokenizer, write_small_tokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))  # surrogates are no Unicode text
# Text that is likely to meet merges, contractions, runs of white space and special tokens.
WORDS = st.lists(
    st.sampled_from(
        ["the", " the", "'s", "'LL", " 've", "1234", " 56", "  ", "\n", "\n\n", "\t", "\u00a0", "\u2003", "\u0085",
         "\x00", "<|endoftext|>", "<|pad|>", "é", "e\u0301", "日本", "👩‍👩‍👧", "\u200d", "\ufeff", "ﬁ", "İ", "ß", "٣",
         "Ⅷ", "²", "_", "'"]
    )
).map("".join)  # fmt: skip


def oracle(folder: Path) -> Any:
    """Return `transformers`' tokenizer with every special token read as plain text."""
    tokenizer = GPT2Tokenizer.from_pretrained(folder)
    tokenizer.split_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module", params=["austen", "real"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ByteLevelBPE, Any]:
    if request.param == "austen":
        folder = find_folder("austen")
    else:
        folder = tmp_path_factory.mktemp("real")
        write_real_tokenizer(folder)
    return ByteLevelBPE.load(folder), oracle(folder)


def their_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
    return ids


@settings(max_examples=600, deadline=None)
@given(text=UNICODE | WORDS)
@example(text="")
@example(text=TEXT)
@example(text="Hello<|endoftext|> world")
@example(text="a" * 3000)
@example(text=" " * 1000 + "x")
def test_ids_equal_those_of_transformers(pair: tuple[ByteLevelBPE, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == their_ids(theirs, text)
    assert ours.decode(ids) == text


def test_every_character_is_split_as_transformers_splits_it(pair: tuple[ByteLevelBPE, Any]) -> None:
    ours, theirs = pair
    characters = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    # Between letters, digits and signs, the class of a character shows in how the text is split.
    texts = [
        "".join(
            f"a{character}b{character}1{character}!{character} {character}"
            for character in characters[start : start + 64]
        )
        for start in range(0, len(characters), 64)
    ]
    differing = [text for text in texts if ours.encode(text) != their_ids(theirs, text)]
    assert differing == []


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_and_never_cut_a_character(
    pair: tuple[ByteLevelBPE, Any], data: st.DataObject
) -> None:
    ours, _ = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=40))
    stream = ours.stream()
    pieces = [stream.push(token_id) for token_id in ids]
    joined = "".join(pieces) + stream.finish()
    assert joined == ours.decode(ids)
    text = data.draw(UNICODE)
    stream = ours.stream()
    pieces = [stream.push(token_id) for token_id in ours.encode(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_of_several_tokens_comes_with_its_last(pair: tuple[ByteLevelBPE, Any]) -> None:
    ours, _ = pair
    ids = ours.encode("👩")
    assert len(ids) > 1
    stream = ours.stream()
    assert [stream.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["👩"]
    stream = ours.stream()
    assert stream.push(ids[0]) + stream.finish() == "\ufffd"


def test_ids_are_the_vocabularys_not_the_ranks(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    renumbered = {token: len(vocab) - 1 - token_id for token, token_id in vocab.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(renumbered))
    ours = ByteLevelBPE.load(tmp_path)
    assert ours.encode(TEXT) == their_ids(oracle(tmp_path), TEXT)
    assert ours.decode(ours.encode(TEXT)) == TEXT


def test_added_tokens_are_kept_and_plain_text_in_a_prompt(tmp_path: Path) -> None:
    write_real_tokenizer(tmp_path, added=("<|pad|>",))
    ours = ByteLevelBPE.load(tmp_path)
    assert ours.vocab_size == 50258
    assert ours.decode([50257, 50256]) == "<|pad|><|endoftext|>"
    assert 50257 not in ours.encode("a <|pad|> b")
    theirs = oracle(tmp_path)
    theirs.add_tokens([AddedToken("<|pad|>", special=True)])
    text = "a <|pad|> b<|endoftext|>"
    assert ours.encode(text) == their_ids(theirs, text)
    theirs.split_special_tokens = False
    found = ours.encode(text, special_tokens=True)
    assert found == theirs(text, add_special_tokens=False)["input_ids"]
    assert {50256, 50257} <= set(found)


def test_of_overlapping_special_tokens_the_first_and_longest_is_found(tmp_path: Path) -> None:
    added = ("<|a|>", "<|a|>b", "|>c", "  \n", "x y", "[^-]")
    write_real_tokenizer(tmp_path, added=added)
    ours, theirs = ByteLevelBPE.load(tmp_path), GPT2Tokenizer.from_pretrained(tmp_path)
    theirs.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    for text in (
        "<|a|>b<|a|>c",
        "a<|a|>|>cb|>c",
        "  \n   \n\n",
        "axx yx y",
        "[^-][^-",
        "<|a|><|endoftext|>" * 3,
        "",
        "-",
    ):
        assert ours.encode(text, special_tokens=True) == theirs(text, add_special_tokens=False)["input_ids"], text


SPACES = (" ", "\n", "\t", "\u3000", "\r\n", "\u00a0 ", "\x85", "  \n")


@pytest.mark.parametrize("space", SPACES)
def test_long_runs_of_white_space_are_split_as_transformers_splits_them(
    pair: tuple[ByteLevelBPE, Any], space: str
) -> None:
    ours, theirs = pair
    for length in (9_999, 10_000, 10_001):
        run = (space * length)[:length]
        for text in (
            run,
            run + "x",
            f"a{run}'s",
            f"a {run} 1{run}\u2003!",
            f"x{run}日{run}\x1c{run}\u200b",
            f"{run}\x1f",
        ):
            assert ours.encode(text) == their_ids(theirs, text)
    text = (space * 50_000)[:50_000] + "word"
    assert ours.encode(text) == their_ids(theirs, text)


SPACED = st.lists(
    st.sampled_from([*SPACES, " ", "\n", "\u2003", "\x1c", "\u200b", "a", "é", "1", "!", "'s", "\0"])
).map("".join)


@settings(max_examples=500, deadline=None)
@given(text=SPACED)
def test_runs_are_cut_as_the_split_would_cut_them(pair: tuple[ByteLevelBPE, Any], text: str) -> None:
    ours, _ = pair
    expected = ours.encode(text)
    with pytest.MonkeyPatch.context() as patch:  # every run of two or more is a long one
        patch.setattr(module, "_LONG", 2)
        patch.setattr(module, "_LONG_SPACE", re.compile(module._LONG_SPACE.pattern.replace("10000", "2")))
        assert ours.encode(text) == expected


def test_special_tokens_end_long_runs_of_white_space(tmp_path: Path) -> None:
    write_real_tokenizer(tmp_path, added=("  <|x|>",))
    ours, theirs = ByteLevelBPE.load(tmp_path), GPT2Tokenizer.from_pretrained(tmp_path)
    theirs.add_tokens([AddedToken("  <|x|>", special=True, normalized=False)])
    run = "\n " * 10_000
    for text in (f"{run}<|endoftext|>{run}a", f"a{run}  <|x|>{run}<|endoftext|>", f"{run} <|x|>"):
        assert ours.encode(text, special_tokens=True) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == their_ids(theirs, text)


@pytest.mark.parametrize(
    "text", [" " * 2_000_000 + "x", "\n" * 2_000_000, "a" * 2_000_000, "x " + "\t" * 1_500_000 + " y"]
)
def test_two_million_characters_of_a_kind_are_encoded(pair: tuple[ByteLevelBPE, Any], text: str) -> None:
    ours, _ = pair
    assert ours.decode(ours.encode(text)) == text


def test_one_letter_over_and_over_takes_no_longer_than_other_text(pair: tuple[ByteLevelBPE, Any]) -> None:
    ours, theirs = pair
    begin = time.perf_counter()
    ours.encode("a" * 200_000)
    assert time.perf_counter() - begin < 3  # some 0.03 s here; 13 s with a tiktoken before 0.13
    for text in ("a" * 50_000, "ab" * 20_000 + "abc", "the" * 10_000, "日本" * 5_000, "!?" * 20_000, "12" * 20_000):
        assert ours.encode(text) == their_ids(theirs, text)


def test_ids_that_stand_for_nothing_are_refused(tmp_path: Path) -> None:
    write_real_tokenizer(tmp_path)
    ours = ByteLevelBPE.load(tmp_path)
    for token_id in (-1, 50257, 10**9, [1], "a", None):
        with pytest.raises(PromptError, match=f"token id {re.escape(repr(token_id))} is not in the vocabulary .*50256"):
            ours.decode([token_id])  # type: ignore[list-item]
    for nothing in (None, 5):
        with pytest.raises(PromptError, match="accepted: a sequence of token ids"):
            ours.decode(nothing)  # type: ignore[arg-type]


def test_text_must_be_text(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    with pytest.raises(PromptError, match="bytes"):
        ByteLevelBPE.load(tmp_path).encode(b"x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vocab", "merges", "reason"),
    [
        ({}, "", "byte 33 is missing"),
        ({"Ġ": None}, None, "not an id"),
        (None, "#version: 0.2\nĠ t\nbad\n", "line 3"),
        (None, "日 本\n", "'日本' is missing"),
        ({"日本": 300}, "日 本\n", "a merge joins to '日本', which has a letter that means no byte"),
        ({"a👧": 300}, "a 👧\n", "a merge joins to 'a👧', which has a letter that means no byte"),
        ({"a\xad": 300}, "a \xad\n", r"a merge joins to 'a\\xad', which has a letter that means no byte"),
        (None, "a  b\n", "line 1 is 'a  b'; expected two tokens"),
        (None, "a b\n\n a b\n", "line 3 is ' a b'; expected two tokens"),
        (None, "a b c\n", "line 1 is 'a b c'; expected two tokens"),
        ({"!": 2}, None, "two tokens share an id"),
        ({"": 300}, None, "the token '' is empty"),
        ({"x": 2**24}, None, r"maps 'x' to 16777216, which is not an id \(accepted: integers from 0 to 16777215\)"),
        ({"x": 10**9}, None, "not an id"),
        ({"x": -1}, None, "not an id"),
        ({"x": True}, None, "not an id"),
        ({"x": 1.0}, None, "not an id"),
        ({"\ud800": 300}, None, "surrogates not allowed"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, vocab: Any, merges: str | None, reason: str) -> None:
    write_small_tokenizer(tmp_path)
    if vocab is not None:
        old = json.loads((tmp_path / "vocab.json").read_text())
        (tmp_path / "vocab.json").write_text(json.dumps(old | vocab if vocab else {}))
    if merges is not None:
        (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(BundleError, match=reason):
        ByteLevelBPE.load(tmp_path)


def test_only_a_version_line_at_the_top_is_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "merges.txt"
    path.write_text("#version: 0.2\n# #\n\u0120 #version:\n", encoding="utf-8")
    assert read_pairs(path) == [("#", "#"), ("\u0120", "#version:")]
    path.write_text("# #\n", encoding="utf-8")
    assert read_pairs(path) == [("#", "#")]
    path.write_bytes(b"\xef\xbb\xbf#version: 0.2\r\n# #\r\n")
    assert read_pairs(path) == [("#", "#")]


def test_ids_beside_the_tokens_are_counted_without_listing_them(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|far|>": 2**24 - 1}))
    begin = time.perf_counter()
    ours = ByteLevelBPE.load(tmp_path)
    assert ours.vocab_size == 2**24
    assert next(ours.unused_ids()) == 300
    assert time.perf_counter() - begin < 3


def test_merges_of_absurd_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "merges.txt"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(BundleError, match=r"merges\.txt has 1,099,511,627,776 bytes; at most"):
        read_pairs(path)
    with pytest.raises(BundleError, match=r"none\.txt is missing"):
        read_pairs(tmp_path / "none.txt")
