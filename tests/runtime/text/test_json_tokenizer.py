"""A tokenizer.json of any kind: text that streams, special tokens, odd text, holes; against `tokenizers` itself."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Native
from tokenizers import decoders

from ortgpt import BundleError, PromptError
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt.text.json_tokenizer import JsonTokenizer
from support import TEXT, write_small_tokenizer
from tokenizer_kinds import make, texts

DECODERS: dict[str, tuple[str, Any]] = {
    "byte level": ("digits", None),
    "WordPiece": ("wordpiece_json", None),
    "BPEDecoder": ("gpt1_json", decoders.BPEDecoder(suffix="</w>")),
    "Metaspace": ("unigram", None),
    "ByteFallback, Fuse, Strip": ("byte_fallback", None),
    "ByteFallback, Metaspace": ("byte_fallback", decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "CTC": ("wordpiece_json", decoders.CTC(pad_token="[PAD]", word_delimiter_token="t")),
    "none": ("wordlevel", None),
    "Fuse": ("wordlevel", decoders.Fuse()),
    "one that looks at the whole text": (
        "unigram",
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Replace(" t", "T")]),
    ),
}


def opened(kind: str, folder: Path, decoder: Any = None) -> JsonTokenizer:
    text = (make(kind, folder) / "tokenizer.json").read_text()
    if decoder is not None:
        native = Native.from_str(text)
        native.decoder = decoder
        text = native.to_str()
    return JsonTokenizer(text, source="the test's")


def holed(tokenizer: JsonTokenizer, token: str) -> tuple[JsonTokenizer, int]:
    """Return a tokenizer without `token`, and the id that therefore has none."""
    values = json.loads(tokenizer._text)
    hole: int = values["model"]["vocab"].pop(token)
    return JsonTokenizer(json.dumps(values), source="the test's"), hole


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_join_to_the_whole(name: str, tmp_path: Path) -> None:
    kind, decoder = DECODERS[name]
    ours = opened(kind, tmp_path / "m", decoder)
    if kind == "byte_fallback":
        ours, hole = holed(ours, "ñ")
        assert list(ours.unused_ids()) == [hole]
    native = Native.from_str(ours._text)
    draw = random.Random(0)
    bytes_ = sorted(ours._run_ids)
    batch = [ours.encode(text) for text in texts(400)]
    for _ in range(1500):  # half of them bytes, where there are such tokens, valid and not
        size = draw.randrange(12)
        batch.append(
            [
                draw.choice(bytes_) if bytes_ and draw.random() < 0.5 else draw.randrange(ours.vocab_size)
                for _ in range(size)
            ]
        )
    for ids in batch:
        whole = native.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == whole
        stream = ours.stream()
        pieces = [stream.push(token_id) for token_id in ids]
        was_whole = stream.is_whole
        last = stream.finish()
        assert "".join(pieces) + last == whole, ids
        assert not (was_whole and last)
        # What follows other ids goes on as the text of all does.
        cut = draw.randrange(len(ids) + 1)
        head = ours.decode(ids[:cut])
        if cut and ids[cut - 1] not in {*ours._starts, *ours.unused_ids()} and whole.startswith(head):
            after = ours.stream(ids[:cut])
            assert "".join(map(after.push, ids[cut:])) + after.finish() == whole[len(head) :] or ours.is_byte_level


def test_no_character_is_cut(tmp_path: Path) -> None:
    for kind in ("byte_fallback", "digits"):
        ours = opened(kind, tmp_path / kind)
        ids = ours.encode("a日👩a")
        stream = ours.stream()
        pieces = [stream.push(token_id) for token_id in ids]
        assert "".join(pieces) == ours.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_text_goes_on_after_a_prompt_that_ends_inside_a_character(tmp_path: Path) -> None:
    ours = opened("byte_fallback", tmp_path / "m")
    byte = {number: token_id for token_id, token in ours._tokens.items() for number in range(256)
            if token == f"<0x{number:02X}>"}  # fmt: skip
    letter = ours.encode("a")[-1]
    whole = [*(byte[each] for each in "世".encode()), letter, letter]
    stream = ours.stream(whole[:2])
    pieces = [*map(stream.push, whole[2:]), stream.finish()]
    assert "".join(pieces) == ours.decode(whole)


def test_no_ids_are_no_text(tmp_path: Path) -> None:
    ours = opened("unigram", tmp_path / "m", decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]))
    assert ours.decode([]) == ""
    stream = ours.stream()
    assert [*map(stream.push, ours.encode("It is")), stream.finish()][-1] == ours.decode(ours.encode("It is"))


def test_words_stream_with_their_spaces(tmp_path: Path) -> None:
    for kind in ("gpt1_json", "wordpiece_json", "unigram", "byte_fallback", "wordlevel"):
        ours = opened(kind, tmp_path / kind)
        ids = ours.encode("a single man in possession")
        stream = ours.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == "a single man in possession"
        begin = len(ours.encode("a single man"))
        stream = ours.stream(ids[:begin])
        assert "".join(map(stream.push, ids[begin:])) + stream.finish() == " in possession"


def test_a_text_begins_anew_after_a_special_token(tmp_path: Path) -> None:
    ours = opened("byte_fallback", tmp_path / "m")
    (start,) = ours.encode("<s>", special_tokens=True)
    stream = ours.stream([start])
    assert "".join(map(stream.push, ours.encode("the man"))) == "the man"
    words = opened("wordpiece_json", tmp_path / "words")
    ids = words.encode("日 man")  # an unknown word is a word
    stream = words.stream(ids[:1])
    assert "".join(map(stream.push, ids[1:])) == " man"


def test_a_token_costs_the_same_after_a_long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("unigram", "byte_fallback", "gpt1_json", "wordpiece_json"):
        ours = opened(kind, tmp_path / kind)
        sizes: list[int] = []
        decode = ours.decode
        monkeypatch.setattr(
            ours, "decode", lambda ids, decode=decode, sizes=sizes: sizes.append(len(ids)) or decode(ids)
        )
        stream = ours.stream()
        for token_id in ours.encode(TEXT.split("\n")[0] * 5):
            stream.push(token_id)
        assert max(sizes) <= 4


def test_special_tokens_are_plain_text_unless_asked_for(tmp_path: Path) -> None:
    ours = opened("byte_fallback", tmp_path / "m")
    marked = ours.encode("a</s>b", special_tokens=True)
    assert 2 in marked
    assert 2 not in ours.encode("a</s>b")
    assert ours.decode(marked) == "a</s> b"
    assert 2 in ours.added_ids()
    # A Unigram whose own vocabulary has the name finds it there, as in `transformers`.
    assert 2 in opened("unigram", tmp_path / "other").encode("a</s>b")


def test_several_threads_with_and_without_special_tokens(tmp_path: Path) -> None:
    ours = opened("unigram", tmp_path / "m")
    text = "a man</s> of fortune<s>"
    want = {flag: ours.encode(text, special_tokens=flag) for flag in (False, True)}
    fresh = JsonTokenizer(ours._text, source="the test's")
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        wrong.extend(flag for _ in range(500) if fresh.encode(text, special_tokens=flag) != want[flag])

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_odd_texts(tmp_path: Path) -> None:
    ours = opened("digits", tmp_path / "m")
    write_small_tokenizer(tmp_path / "m")
    tiktoken = ByteLevelBPE.load(tmp_path / "m")
    for text in ("\ud800", "a\udfffb", "\ud83d\ude00", ""):  # half a character; two halves that make one; nothing
        assert ours.decode(ours.encode(text)) == tiktoken.decode(tiktoken.encode(text))
    for wrong in (b"a", None, 7, ["a"]):
        with pytest.raises(PromptError, match="text is a "):
            ours.encode(wrong)  # type: ignore[arg-type]  # as a caller without types might
    for ids in ([-1], [ours.vocab_size], ["a"], 7):
        with pytest.raises(PromptError):
            ours.decode(ids)  # type: ignore[arg-type]  # as above


def test_a_token_that_cannot_be_encoded_is_one_line(tmp_path: Path) -> None:
    folder = make("wordlevel", tmp_path / "m")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["unk_token"] = "missing"
    ours = JsonTokenizer(json.dumps(values), source="the test's")
    token = next(each for each in json.loads(ours._text)["model"]["vocab"] if each.isalpha())
    with pytest.raises(PromptError) as caught:
        ours.encode(f"{token} zzz")
    assert str(caught.value) == (
        f"the tokenizer has no token for 'zzz', at character {len(token) + 1} of the text (accepted: the "
        f"{ours.vocab_size} tokens of the vocabulary, which has none for unknown ones)"
    )


def test_holes_decode_to_nothing(tmp_path: Path) -> None:
    ours = opened("byte_fallback", tmp_path / "m")
    ids = ours.encode("the man")
    less, hole = holed(ours, "ñ")
    assert less.decode([ids[0], hole, *ids[1:]]) == "the man"
    assert less.size_bytes([hole]) == 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "7", '{"model": 7}', '{"model": {"type": "BPE", "vocab": {}, "merges": []}}']
)
def test_damaged_files_are_one_line(text: str) -> None:
    with pytest.raises(BundleError, match=r"^the test's ") as caught:
        JsonTokenizer(text, source="the test's")
    assert "\n" not in str(caught.value)


def test_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    native = Native.from_file(str(make("unigram", tmp_path / "m") / "tokenizer.json"))
    native.enable_truncation(3)
    native.enable_padding(length=9)
    ours = JsonTokenizer(native.to_str(), source="the test's")
    text = "a single man in possession of a good fortune"
    assert ours.decode(ours.encode(text)) == text


def test_bytes_of_tokens(tmp_path: Path) -> None:
    ours = opened("digits", tmp_path / "m")
    ids = ours.encode("日 12")
    assert b"".join(map(ours.token_bytes, ids)) == "日 12".encode()
    assert ours.size_bytes(ids[:1]) == 1
    other = opened("unigram", tmp_path / "other")
    assert other.size_bytes(other.encode("a日")) == len(other.decode(other.encode("a日")).encode())
    with pytest.raises(PromptError, match="no bytes of their own"):
        other.token_bytes(3)


def test_which_tokenizers_are_the_same(tmp_path: Path) -> None:
    one, two = opened("unigram", tmp_path / "m"), opened("digits", tmp_path / "n")
    assert one.is_same(JsonTokenizer(json.dumps(json.loads(one._text), indent=1), source="the test's"))
    assert not one.is_same(two)
    write_small_tokenizer(tmp_path)
    assert not one.is_same(ByteLevelBPE.load(tmp_path))
    assert not ByteLevelBPE.load(tmp_path).is_same(one)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")
def test_a_forked_child_may_use_it(tmp_path: Path) -> None:
    ours = opened("unigram", tmp_path / "m")
    want = ours.encode("a man</s>", special_tokens=True)
    child = os.fork()
    if child == 0:
        fresh = ours.encode("a man</s>", special_tokens=True) == want and ours.decode(ours.encode("a man")) == "a man"
        os._exit(0 if fresh else 1)
    assert os.waitpid(child, 0)[1] == 0
