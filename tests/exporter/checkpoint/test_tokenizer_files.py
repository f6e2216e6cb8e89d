"""Tokenizer files of every form against `transformers` and `tokenizers`, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Oracle
from transformers import AddedToken, GPT2Tokenizer

from ortgpt import BundleError
from ortgpt.contract import TokenizerKind
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint.merge_check import unreachable_merges
from ortgpt_exporter.checkpoint.tokenizer_files import read_tokenizer
from support import TEXT, read_pairs, write_real_tokenizer, write_small_tokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
MIXED = f"{TEXT}'S it's  a   test\n\n \t x1234 ٣²!?\u00a0\u3000 日 "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my-model").mkdir()
    write_small_tokenizer(tmp_path / "my-model")
    return tmp_path / "my-model"


def saved(folder: Path) -> Any:
    """Turn the folder's tokenizer into what `transformers` saves today, and return its tokenizer.json parsed."""
    GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    return json.loads((folder / "tokenizer.json").read_text())


def refused(folder: Path, reason: str) -> None:
    """Check that the folder is refused in one line, which names it, and soon."""
    begin = time.perf_counter()
    with pytest.raises((ExportError, BundleError), match=reason) as caught:
        read_tokenizer(folder)
    assert time.perf_counter() - begin < 5
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_a_pair_of_files_is_taken_as_it_is(folder: Path) -> None:
    files = read_tokenizer(folder)
    assert files.texts == {name: (folder / name).read_text() for name in ("vocab.json", "merges.txt")}
    assert files.vocab == json.loads((folder / "vocab.json").read_text())
    assert (files.tokenizer.vocab_size, files.notes) == (300, ())


def test_the_real_tokenizer_is_supported(tmp_path: Path) -> None:
    write_real_tokenizer(tmp_path)
    assert read_tokenizer(tmp_path).tokenizer.vocab_size == 50257


def test_ids_out_of_merge_order(folder: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps({token: 299 - token_id for token, token_id in vocab.items()}))
    theirs = GPT2Tokenizer.from_pretrained(folder)
    ids = read_tokenizer(folder).tokenizer.encode(MIXED)
    assert ids == theirs(MIXED)["input_ids"]
    assert ids != [299 - token_id for token_id in ids]


def test_merges_that_begin_with_a_hash(folder: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = read_pairs(folder / "merges.txt")
    merges = [("#", "#"), ("##", "$"), *merges, ("Ġ", "##")]
    vocab |= {token: 300 + index for index, token in enumerate(("##", "##$", "Ġ##"))}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    text = "# ## ### ##$ #version ####"
    for header in ("", "#version: 0.2\n"):
        (folder / "merges.txt").write_text(header + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
        ours = read_tokenizer(folder).tokenizer
        assert ours.encode(text) == GPT2Tokenizer.from_pretrained(folder)(text)["input_ids"]
        assert {301, 302} <= set(ours.encode(text))


def test_a_byte_order_mark(folder: Path) -> None:
    merges = (folder / "merges.txt").read_bytes()
    (folder / "merges.txt").write_bytes(b"\xef\xbb\xbf" + merges)
    files = read_tokenizer(folder)
    assert files.texts["merges.txt"].encode() == merges
    assert files.tokenizer.vocab_size == 300
    vocab = (folder / "vocab.json").read_bytes()
    (folder / "vocab.json").write_bytes(b"\xef\xbb\xbf" + vocab)
    assert read_tokenizer(folder).texts["vocab.json"].encode() == vocab


def test_what_transformers_saves_today(folder: Path) -> None:
    theirs = GPT2Tokenizer.from_pretrained(folder)
    theirs.add_tokens(["<|user|>"], special_tokens=True)
    theirs.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    files = read_tokenizer(folder)
    assert (files.tokenizer.vocab_size, files.notes) == (301, ())
    text = "It is a truth, <|user|> — 日本"
    assert files.tokenizer.encode(text, special_tokens=True) == theirs(text, add_special_tokens=False)["input_ids"]
    for name, content in files.texts.items():
        (folder / name).write_text(content)
    (folder / "tokenizer.json").unlink()
    assert ByteLevelBPE.load(folder).encode(MIXED) == files.tokenizer.encode(MIXED)
    assert GPT2Tokenizer.from_pretrained(folder)(MIXED)["input_ids"] == files.tokenizer.encode(MIXED)


def split(pattern: str = GPT2_PATTERN, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def letters(**values: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False} | values


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize(
    "splitter",
    [
        letters(use_regex=True),
        sequence(letters(use_regex=True)),
        sequence(split(), letters()),
        sequence(split(behavior="Removed", invert=True), letters()),
        sequence(split(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), letters()),
    ],
)
def test_splitters_that_split_as_gpt2_does(folder: Path, splitter: dict[str, Any]) -> None:
    values = saved(folder) | {"pre_tokenizer": splitter}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    theirs = Oracle.from_file(str(folder / "tokenizer.json"))
    assert read_tokenizer(folder).tokenizer.encode(MIXED) == theirs.encode(MIXED).ids


@pytest.mark.parametrize("merge", [lambda pair: list(pair), lambda pair: " ".join(pair)])
def test_old_and_new_ways_to_write_a_tokenizer_json(folder: Path, merge: Callable[[Any], Any]) -> None:
    values = saved(folder)
    values["model"]["merges"] = [merge(pair) for pair in values["model"]["merges"]]
    values["pre_tokenizer"].pop("use_regex")
    values["model"].pop("type")  # as gpt2's own file on the hub has it
    (folder / "tokenizer.json").write_text(json.dumps(values))
    theirs = Oracle.from_file(str(folder / "tokenizer.json"))
    assert read_tokenizer(folder).tokenizer.encode(MIXED) == theirs.encode(MIXED).ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t["model"].update(type="WordPiece"), r"model\.type = 'WordPiece' \(accepted: BPE\)"),
        (lambda t: t["model"].pop("merges"), r"model\.merges is missing"),
        (lambda t: t.update(model=7), r"model\.vocab or model\.merges is missing"),
        (lambda t: t["model"].update(vocab=[["a", -1.0]]), r"model\.vocab or model\.merges is missing"),
        (lambda t: t["model"]["merges"].append("a"), r"merges\[\d+\] = 'a' \(accepted: two tokens\)"),
        (lambda t: t["model"]["merges"].append(["a", ""]), r"\['a', ''\] \(accepted: two tokens\)"),
        (lambda t: t["model"]["merges"].append(["a", "b", "c"]), "accepted: two tokens"),
        (lambda t: t["model"]["merges"].append([["a"], "b"]), "accepted: two tokens"),
        (lambda t: t["model"]["merges"].append(["\ud800", "b"]), "is not readable JSON: .*surrogates not allowed"),
        (lambda t: t["model"]["vocab"].update(x=None), r"model\.vocab of .* maps 'x' to None, which is not an id"),
        (lambda t: t["model"]["vocab"].update(x=10**9), "maps 'x' to 1000000000, which is not an id"),
        (lambda t: t["model"]["vocab"].update({"": 300}), "the token '' is empty"),
        (lambda t: t["model"]["vocab"].pop("Ġ"), "byte 32 is missing"),
    ],
)
def test_a_damaged_tokenizer_json_is_refused(folder: Path, change: Callable[[Any], None], reason: str) -> None:
    values = saved(folder)
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    refused(folder, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.update(normalizer={"type": "NFC"}), r"normalizer = \{'type': 'NFC'\} \(GPT-2's: null\)"),
        (lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space = True"),
        (lambda t: t["pre_tokenizer"].update(use_regex=False), r"use_regex = False \(GPT-2's: true\)"),
        (lambda t: t.update(pre_tokenizer=None), r"pre_tokenizer = None \(GPT-2's: ByteLevel, or"),
        (lambda t: t.update(pre_tokenizer="x"), "pre_tokenizer = None"),
        (lambda t: t.update(pre_tokenizer=sequence()), r"pre_tokenizer = a Sequence of \[\]"),
        (lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": 7}), r"a Sequence of \[\]"),
        (lambda t: t.update(pre_tokenizer={"type": "Metaspace"}), "pre_tokenizer = 'Metaspace'"),
        (
            lambda t: t.update(pre_tokenizer=sequence({"type": "Digits"}, letters(use_regex=True))),
            r"a Sequence of \['Digits', 'ByteLevel'\]",
        ),
        (
            lambda t: t.update(pre_tokenizer=sequence(split(), letters(use_regex=True))),
            r"use_regex = True \(GPT-2's: false",
        ),
        (lambda t: t.update(pre_tokenizer=sequence(split(LLAMA_PATTERN), letters())), r"splits by .*p\{N\}\{1,3\}"),
        (lambda t: t.update(pre_tokenizer=sequence(split(behavior="Removed"), letters())), "'Removed', False"),
        (
            lambda t: t.update(pre_tokenizer=sequence(split() | {"pattern": {"String": " "}}, letters())),
            r"splits by \{'String': ' '\}",
        ),
        (lambda t: t["model"].update(dropout=0.1), r"model\.dropout = 0\.1 \(GPT-2's: null\)"),
        (lambda t: t["model"].update(ignore_merges=True), "ignore_merges = True"),
    ],
)
def test_what_is_not_gpt2s_does_not_count_for_its_class_and_counts_in_a_file(
    folder: Path, change: Callable[[Any], None], reason: str
) -> None:
    values = saved(folder)
    change(values)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(values))
    try:
        theirs = Oracle.from_file(str(path))
    except Exception:  # noqa: BLE001  # it raises no other
        for damaged in (folder, path):
            refused(damaged, "this tokenizer is damaged, or of a kind that `tokenizers` does not run")
        return
    files = read_tokenizer(folder)
    assert files.kind == TokenizerKind.BYTE_LEVEL_BPE
    assert files.tokenizer.encode(MIXED) == GPT2Tokenizer.from_pretrained(folder)(MIXED)["input_ids"]
    (note,) = files.notes
    assert re.search(f"left out: .*{reason}", note)
    named = read_tokenizer(path)
    assert named.kind == TokenizerKind.TOKENIZER_JSON
    assert re.search(f"needs the package tokenizers .*{reason}", named.notes[0])
    if "dropout" not in reason:
        assert named.tokenizer.encode(MIXED) == theirs.encode(MIXED, add_special_tokens=False).ids


def test_added_tokens_come_from_three_files(folder: Path) -> None:
    entry = {"content": "<|sep|>", "special": True, "lstrip": False}
    (folder / "added_tokens.json").write_text('{"<|pad|>": 300, "<|endoftext|>": 0}')
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 301, **entry}]}))
    decoder = {"301": entry, "302": {"content": "<|last|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    files = read_tokenizer(folder)
    assert (files.tokenizer.vocab_size, files.notes) == (303, ())
    assert files.tokenizer.decode([300, 301, 302]) == "<|pad|><|sep|><|last|>"
    assert files.vocab == json.loads(files.texts["vocab.json"])
    assert files.vocab["<|last|>"] == 302
    assert files.texts["merges.txt"] == (folder / "merges.txt").read_text()


@pytest.mark.parametrize(
    ("added", "entries", "reason"),
    [
        ('{"<|pad|>": 7}', [], r"contradict vocab\.json or each other: '<\|pad\|>' = 7"),
        ('{"<|endoftext|>": 300}', [], r"'<\|endoftext\|>' = 300"),
        ('{"<|pad|>": 300}', [{"content": "<|pad|>", "id": 301}], r"'<\|pad\|>' = 301"),
        ('{"<|pad|>": 300}', [{"content": "<|sep|>", "id": 300}], r"'<\|sep\|>' = 300"),
        (json.dumps({f"<{i}>": 7 for i in range(100)}), [], r"'<27>' = 7; and 80 more"),
        ('{"x": "y"}', [], r"an added token is 'x' with id 'y' \(accepted: a text and an integer from 0 to 16777215\)"),
        ('{"x": null}', [], "accepted: a text and an integer"),
        ('{"x": -1}', [], "accepted: a text and an integer"),
        ('{"x": 100000000000}', [], "accepted: a text and an integer"),
        ('{"": 300}', [], "an added token is '' with id 300"),
        ("{}", [7], "an added token is None with id None"),
        ("{}", {"id": 1}, "accepted: a text and an integer"),
        ("{}", [{"id": True, "content": "x"}], "with id True"),
        ("[]", [], r"added_tokens\.json holds a JSON list"),
        ('{"x": 1' + "0" * 5000 + "}", [], r"added_tokens\.json is not readable JSON"),
    ],
)
def test_added_tokens_of_another_form_are_refused(folder: Path, added: str, entries: Any, reason: str) -> None:
    (folder / "added_tokens.json").write_text(added)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": entries}))
    refused(folder, reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "an added token is '<x>' with id 'x'"),
        ({"added_tokens_decoder": {"300": 7}}, "an added token is None with id 300"),
    ],
)
def test_a_tokenizer_config_that_says_otherwise(folder: Path, config: Any, reason: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    refused(folder, reason)


def test_a_tokenizer_json_beside_the_pair_must_be_the_same(folder: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    values = saved(whole)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert read_tokenizer(folder).tokenizer.vocab_size == 300
    merges = values["model"]["merges"]
    for change, reason in (
        ({"merges": [merges[1], merges[0], *merges[2:]]}, r"\(the merges differ\)"),
        ({"vocab": values["model"]["vocab"] | {"a": 66, "b": 65}}, r"the id of '[ab]' differs"),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(values | {"model": values["model"] | change}))
        refused(folder, rf"tokenizer\.json is another tokenizer than vocab\.json and merges\.txt .*{reason}")
    (folder / "tokenizer.json").write_text(json.dumps(values | {"normalizer": {"type": "Lowercase"}}))
    assert read_tokenizer(folder).kind == TokenizerKind.TOKENIZER_JSON  # no file names a class
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert "left out: normalizer = " in read_tokenizer(folder).notes[0]


def test_what_transformers_would_add_is_told(folder: Path) -> None:
    theirs = GPT2Tokenizer.from_pretrained(folder)
    theirs.add_tokens([AddedToken("<|mask|>", lstrip=True, special=True), AddedToken("word", special=False)])
    theirs.save_pretrained(folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    around, flagged, plain = read_tokenizer(folder).notes
    assert "puts special tokens around a text" in around
    assert "'<|mask|>' (lstrip)" in flagged
    assert "'word'" in plain
    assert "<|mask|>" not in plain


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"\xff", b'{"\\ud800": 300}', b"[]", b"[" * 100_000, b""])
def test_files_that_are_no_text_are_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    refused(folder, name if content or name != "merges.txt" else "comes from no merge")


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "merges.txt").unlink()
    refused(folder, r"no merges\.txt in .*any as tokenizer\.json, or a vocab\.txt")
    (folder / "vocab.json").unlink()
    refused(folder, r"no vocab\.json and no merges\.txt in ")


def test_holes_in_the_vocabulary_are_refused(folder: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text())
    last = max(vocab, key=lambda token: vocab[token])
    for far in (305, 2**24 - 1):
        (folder / "vocab.json").write_text(json.dumps(vocab | {last: far}))
        refused(folder, "id 299 has no token; id 300 has no token; id 301 has no token$")


def test_merges_that_were_cut_short_are_noticed(folder: Path) -> None:
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (0, 1, len(lines) // 4):
        (folder / "merges.txt").write_text("".join(lines[:kept]), encoding="utf-8")
        refused(folder, r"comes from no merge \(is merges\.txt complete\?\)")


def test_absurd_merges_are_refused_soon(folder: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = [("~" * 2**i, "~" * 2**i) for i in range(20)]
    long = dict.fromkeys("".join(pair) for pair in merges)
    (folder / "vocab.json").write_text(json.dumps(vocab | {text: 300 + i for i, text in enumerate(long)}))
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in [*read_pairs(folder / "merges.txt"), *merges]))
    refused(folder, r"its longest merge has 1,048,576 letters, all have .* \(accepted: at most 16,384 and 4,194,304\)")
    assert unreachable_merges(merges[:14]) == []


def test_many_added_tokens_are_taken(folder: Path) -> None:
    words = {f"<word {number}>": 300 + number for number in range(100_000)}
    (folder / "added_tokens.json").write_text(json.dumps(words))
    begin = time.perf_counter()
    ours = read_tokenizer(folder).tokenizer
    assert ours.encode("<word 77><word 7<word 99999>", special_tokens=True)[0] == 377
    assert time.perf_counter() - begin < 5


def test_merges_that_byte_ranks_cannot_reproduce_are_found(folder: Path) -> None:
    assert unreachable_merges([("a", "b"), ("ab", "c"), ("c", "d")]) == []
    # "abc" is made of ab + c by rank, never of a + bc.
    assert unreachable_merges([("a", "b"), ("b", "c"), ("a", "bc")]) == [("a", "bc")]
    # The part "bc" of the merge comes from no merge before it.
    assert unreachable_merges([("a", "b"), ("a", "bc")]) == [("a", "bc")]
    # Two pairs for one token: a rank of joined text cannot tell them apart.
    assert unreachable_merges([("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")]) == [("a", "bc")]
    # Equal ranks are joined from the left: aaa is aa + a.
    assert unreachable_merges([("a", "a"), ("aa", "a")]) == []
    assert unreachable_merges([("a", "a"), ("a", "aa")]) == [("a", "aa")]
    assert unreachable_merges([("a", "a"), ("aa", "aa"), ("aaaa", "a"), ("aaaa", "aa")]) == []
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = read_pairs(folder / "merges.txt")
    left, right = next((left, right) for left, right in merges if len(left + right) == 3 and len(right) == 1)
    odd = (left[0], left[1] + right)
    vocab |= {"".join(odd): len(vocab), left[1] + right: len(vocab) + 1}
    vocab = {token: index for index, token in enumerate(vocab)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = [*merges, (left[1], right), odd]
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in dict.fromkeys(lines)))
    files = read_tokenizer(folder)
    assert files.kind == TokenizerKind.TOKENIZER_JSON
    assert "is never reached by the rank of what it joins" in files.notes[0]
    assert files.tokenizer.encode(MIXED) == GPT2Tokenizer.from_pretrained(folder)(MIXED)["input_ids"]
