"""Special tokens that the files declare without ids: the ids are those of `transformers` from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer

from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint.special_tokens import declared_tokens, number_tokens
from ortgpt_exporter.checkpoint.tokenizer_files import read_tokenizer
from ortgpt_exporter.checkpoint.tokenizer_folder import TokenizerFiles
from support import write_small_tokenizer

MAP, CONFIG, ADDED = "special_tokens_map.json", "tokenizer_config.json", "added_tokens.json"
START_AND_PAD = {"bos_token": "<|startoftext|>", "pad_token": "<|pad|>"}
EVERY = {
    "additional_special_tokens": ["<a>", "<b>"], "mask_token": "<m>", "cls_token": "<c>", "pad_token": "<p>",
    "sep_token": "<s>", "unk_token": "<u>", "eos_token": "<e>", "bos_token": "<o>",
}  # fmt: skip


def plain(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False} | flags


def typed(text: str) -> dict[str, Any]:
    return {"__type": "AddedToken", **plain(text)}


def write_folder(folder: Path, files: dict[str, Any], *, whole: bool, without_end: bool = False) -> Path:
    """Write a tokenizer as two files, or as one with `whole`, and `files` beside it."""
    folder.mkdir()
    write_small_tokenizer(folder)
    if without_end:
        vocab = json.loads((folder / "vocab.json").read_text())
        vocab["<|begin|>"] = vocab.pop("<|endoftext|>")
        (folder / "vocab.json").write_text(json.dumps(vocab))
    if whole:
        tokenizer = GPT2Tokenizer.from_pretrained(folder)
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        (folder / "tokenizer.json").write_text(json.dumps(values | {"added_tokens": []}))
        for name in ("vocab.json", "merges.txt"):
            (folder / name).unlink()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder


DECLARATIONS: dict[str, dict[str, Any]] = {
    "map": {MAP: START_AND_PAD},
    "config": {CONFIG: START_AND_PAD},
    "both files": {MAP: START_AND_PAD, CONFIG: {"pad_token": "<p>", "sep_token": "<s>"}},
    "every name, in the map": {MAP: EVERY},
    "every name, in the config": {CONFIG: EVERY},
    "extra tokens, in the map": {MAP: {"extra_special_tokens": ["<a>", plain("<b>")], "pad_token": "<p>"}},
    "extra tokens, in the config": {CONFIG: {"extra_special_tokens": ["<a>", typed("<b>")], "pad_token": "<p>"}},
    "extra tokens, in both": {
        CONFIG: {"extra_special_tokens": ["<a>"]}, MAP: {"extra_special_tokens": ["<b>", "<a>"]},
    },
    "both names of extra tokens": {CONFIG: {"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<b>"]}},
    "earlier name in both files": {
        CONFIG: {"additional_special_tokens": ["<a>"]}, MAP: {"additional_special_tokens": ["<b>"]},
    },
    "named extra tokens": {CONFIG: {"extra_special_tokens": {"x_token": "<a>", "y": "<b>"}, "pad_token": "<p>"}},
    "named extra tokens, in the map": {MAP: {"extra_special_tokens": {"x_token": "<a>"}, "sep_token": "<s>"}},
    "names of their own": {CONFIG: {"foo_token": "<f>", "pad_token": "<p>", "bar_token": typed("<bar>")}},
    "names of their own, in the map": {MAP: {"foo_token": "<f>", "pad_token": "<p>"}, CONFIG: {"z_token": "<z>"}},
    "names of their own, as v5 saves them": {CONFIG: {"model_specific_special_tokens": {"i": "<i>"}}},
    "objects": {MAP: {"bos_token": plain("<o>"), "pad_token": plain("<p>")}, CONFIG: {"sep_token": typed("<s>")}},
    "one text thrice": {CONFIG: {"bos_token": "<x>", "eos_token": "<x>", "additional_special_tokens": ["<x>", "<y>"]}},
    "texts of the vocabulary": {CONFIG: {"bos_token": "!", "pad_token": "<|endoftext|>", "sep_token": "<s>"}},
    "null and empty": {CONFIG: {"bos_token": None, "unk_token": None, "eos_token": None, "pad_token": ""}},
    "added_tokens.json": {MAP: {"pad_token": "<p>", "sep_token": "<z>"}, ADDED: {"<z>": 300}},
    "a decoder hides the map": {
        MAP: {"pad_token": "<p>"},
        CONFIG: {"bos_token": "<o>", "added_tokens_decoder": {"300": plain("<z>", special=True)}},
    },
    "an empty decoder hides it, too": {
        MAP: {"pad_token": "<p>"}, CONFIG: {"added_tokens_decoder": {}, "sep_token": "<s>"},
    },
    "nothing": {},
}  # fmt: skip


@pytest.mark.parametrize("without_end", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", DECLARATIONS)
def test_ids_are_those_of_transformers(case: str, whole: bool, without_end: bool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", DECLARATIONS[case], whole=whole, without_end=without_end)
    files = read_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert files.vocab == theirs.get_vocab()
    text = "Hi<|startoftext|>It is<p><a> a<x>truth<s><f>"
    assert files.tokenizer.encode(text, special_tokens=True) == theirs(text, add_special_tokens=False)["input_ids"]
    assert files.numbered.items() <= files.vocab.items()
    assert (len(files.numbered) > 0) == any("got the next free" in note for note in files.notes)


def test_of_another_class_end_of_text_is_not_assumed(tmp_path: Path) -> None:
    declared = {CONFIG: START_AND_PAD | {"tokenizer_class": "PreTrainedTokenizerFast"}}
    folder = write_folder(tmp_path / "model", declared, whole=True, without_end=True)
    assert read_tokenizer(folder).vocab == AutoTokenizer.from_pretrained(folder).get_vocab()


def numbered(folder: Path, rows: int) -> tuple[TokenizerFiles, str]:
    files = read_tokenizer(folder, rows=rows)
    return files, " ".join(files.notes)


def test_tokens_beyond_the_rows_are_left_out_and_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {MAP: START_AND_PAD, ADDED: {"<z>": 300}}, whole=False)
    for rows in (303, 310):
        files, notes = numbered(folder, rows)
        assert files.numbered == {"<|startoftext|>": 301, "<|pad|>": 302}
        assert "'<|startoftext|>' = 301; '<|pad|>' = 302" in notes
        assert "have no row" not in notes
    files, notes = numbered(folder, 302)
    assert (files.numbered, files.tokenizer.vocab_size) == ({"<|startoftext|>": 301}, 302)
    assert "have no row in the model, which has 302, so they are left out" in notes
    assert notes.endswith("plain text in a prompt: '<|pad|>' = 302")
    assert "<|pad|>" not in json.loads(files.texts["vocab.json"])
    assert files.tokenizer.decode(files.tokenizer.encode("a<|pad|>b", special_tokens=True)) == "a<|pad|>b"
    files, notes = numbered(folder, 300)
    assert (files.numbered, files.tokenizer.vocab_size) == ({}, 300)
    assert notes.endswith("'<z>' = 300; '<|startoftext|>' = 301; '<|pad|>' = 302")
    # Of a model that lacks rows for tokens of merges, nothing is left out: it is another model's tokenizer.
    assert read_tokenizer(folder, rows=250).tokenizer.vocab_size == 303


def test_flags_of_declared_tokens_are_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {MAP: {"mask_token": plain("<m>", lstrip=True)}}, whole=False)
    assert any("'<m>' (lstrip)" in note for note in read_tokenizer(folder).notes)


@pytest.mark.parametrize("value", [7, ["<a>"], {"content": 3}, {}, True])
@pytest.mark.parametrize("name", [MAP, CONFIG])
def test_a_special_token_that_is_no_text_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {name: {"bos_token": value}}, whole=False)
    with pytest.raises(ExportError, match=r"model: a special token is .* \(accepted: a text, or an object with one"):
        read_tokenizer(folder)


def test_numbers_follow_the_largest_id() -> None:
    tokens = declared_tokens({"pad_token": "<p>"}, {}, "")
    assert [token["content"] for token in tokens] == ["<|endoftext|>"] * 3 + ["<p>"]
    assert number_tokens(tokens, {"a": 0, "<|endoftext|>": 4}) == {"<p>": 5}
