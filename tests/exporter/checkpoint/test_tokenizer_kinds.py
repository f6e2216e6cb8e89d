"""Ids of every kind of tokenizer against AutoTokenizer of `transformers`, and what an export says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, ByteLevelBPETokenizer, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Native
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ortgpt.contract import TokenizerKind
from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint.tokenizer_files import no_tokenizer, read_tokenizer
from support import write_small_tokenizer
from tokenizer_kinds import KINDS, make, texts


def ids_of(tokenizer: Any, batch: list[str], **options: Any) -> list[list[int]]:
    found: list[list[int]] = tokenizer(batch, add_special_tokens=False, **options)["input_ids"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path / "m")
    files, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert files.kind == TokenizerKind.TOKENIZER_JSON
    assert files.notes[0].startswith("the bundle needs the package tokenizers (extra [tokenizers])")
    batch = texts(10_000 if kind == "gpt1" else 400)
    ours = files.tokenizer
    assert [ours.encode(text, special_tokens=True) for text in batch] == ids_of(theirs, batch)
    plain = ids_of(theirs, batch, split_special_tokens=True)
    assert [ours.encode(text) for text in batch] == plain
    assert len(set(map(tuple, plain))) > len(batch) / 8  # not all unknown
    assert [ours.decode(ids) for ids in plain] == theirs.batch_decode(plain, clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(theirs)
    assert files.vocab == theirs.get_vocab()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("prefix_space", "pre_tokenizer: add_prefix_space = True (GPT-2's: false)"),
        ("digits", "pre_tokenizer = a Sequence of ['Digits', 'ByteLevel']"),
        ("nfc_lower_case", "normalizer = {"),
        ("pair_with_prefix_space", "add_prefix_space = True"),
        ("unigram", "model.type = 'Unigram' (GPT-2's: BPE)"),
        ("vocab_txt", "it is a WordPiece (BertTokenizer)"),
        ("gpt1", "it is GPT-1's (OpenAIGPTTokenizer)"),
        ("odd_merges", "its merge 'q' 'zx' is never reached by the rank of what it joins"),
    ],
)
def test_the_reason_is_told(kind: str, reason: str, tmp_path: Path) -> None:
    assert reason in read_tokenizer(make(kind, tmp_path / "m")).notes[0]


def test_a_file_is_taken_as_it_is_and_unchanged(tmp_path: Path) -> None:
    folder = make("byte_fallback", tmp_path / "m")
    text = (folder / "tokenizer.json").read_text()
    for path in (folder, folder / "tokenizer.json"):
        assert read_tokenizer(path).texts == {"tokenizer.json": text}


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "GPT2TokenizerFast", None])
def test_gpt2s_class_takes_vocabulary_and_merges_only(class_name: str | None, tmp_path: Path) -> None:
    folder = make("nfc_lower_case", tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name} if class_name else {}))
    files, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert files.kind == TokenizerKind.BYTE_LEVEL_BPE
    batch = texts(300)
    assert [files.tokenizer.encode(text) for text in batch] == ids_of(theirs, batch, split_special_tokens=True)
    assert any("left out: normalizer = {" in note for note in files.notes)
    assert files.tokenizer_json is None
    named = read_tokenizer(folder / "tokenizer.json")
    assert (named.kind, named.tokenizer.encode("É")) != (files.kind, files.tokenizer.encode("É"))


def test_tokens_that_are_no_letters_of_gpt2_are_meant_as_they_are(tmp_path: Path) -> None:
    folder = make("unigram", tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    files = read_tokenizer(folder)
    assert files.tokenizer.decode(files.tokenizer.encode("a single man")) == "a single man"
    assert any("unless tokenizer_config.json names the class PreTrainedTokenizerFast" in note for note in files.notes)


def test_tokens_without_an_id_and_beyond_the_rows(tmp_path: Path) -> None:
    folder = make("wordpiece_json", tmp_path / "m")
    theirs = AutoTokenizer.from_pretrained(folder)
    files = read_tokenizer(folder)
    last = files.tokenizer.vocab_size - 1
    assert files.numbered == {"<new pad>": last}
    assert theirs.convert_tokens_to_ids("<new pad>") == last
    assert files.roles["pad_token"] == "<new pad>"
    fewer = read_tokenizer(folder, rows=last)
    assert fewer.tokenizer.vocab_size == last
    assert "pad_token" not in fewer.roles
    assert any(f"have no row in the model, which has {last}" in note for note in fewer.notes)
    assert fewer.tokenizer.encode("<new pad>", special_tokens=True) == files.tokenizer.encode("<new pad>")


def test_added_tokens_that_contradict_are_refused(tmp_path: Path) -> None:
    folder = make("unigram", tmp_path / "m")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"7": {"content": "<x>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="added tokens that contradict the vocabulary: '<x>' = 7"):
        read_tokenizer(folder)


@pytest.mark.parametrize("model", [7, {"type": "Unigram", "vocab": 7}, {"type": "None"}, {}])
def test_a_damaged_file_is_no_other_kind(model: Any, tmp_path: Path) -> None:
    folder = make("unigram", tmp_path / "m")
    values = json.loads((folder / "tokenizer.json").read_text()) | {"model": model}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ExportError, match=r"this tokenizer is (damaged|not supported)") as caught:
        read_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_dropout_is_left_out(tmp_path: Path) -> None:
    folder = make("byte_fallback", tmp_path / "m")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(values))
    files = read_tokenizer(folder)
    assert len({tuple(files.tokenizer.encode("the therein")) for _ in range(20)}) == 1
    assert any("model.dropout" in note for note in files.notes)


def test_a_pair_that_contradicts_tokenizer_json_is_refused(tmp_path: Path) -> None:
    folder = make("digits", tmp_path / "m")
    write_small_tokenizer(folder)
    with pytest.raises(ExportError, match="is another tokenizer than"):
        read_tokenizer(folder)


def test_an_empty_vocab_txt_is_refused(tmp_path: Path) -> None:
    folder = make("vocab_txt", tmp_path / "m")
    (folder / "vocab.txt").write_text("\n")
    with pytest.raises(ExportError, match=r"vocab\.txt is empty"):
        read_tokenizer(folder)


def test_no_tokenizer_has_an_id_for_each_row() -> None:
    files = no_tokenizer(17)
    assert (files.kind, files.tokenizer.vocab_size, files.texts) == (TokenizerKind.NONE, 17, {})


def test_a_declared_token_keeps_the_flags_that_tokenizer_json_gives_it(tmp_path: Path) -> None:
    folder = make("nfc_lower_case", tmp_path / "m")
    native = Native.from_file(str(folder / "tokenizer.json"))
    native.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    native.add_tokens([AddedToken("<LS>", lstrip=True)])
    PreTrainedTokenizerFast(tokenizer_object=native, mask_token="<mask>").save_pretrained(folder)
    files, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <mask> b <LS> c"
    assert files.tokenizer.encode(text, special_tokens=True) == theirs(text, add_special_tokens=False)["input_ids"]
    ids = files.tokenizer.encode(text, special_tokens=True)
    stream = files.tokenizer.stream()
    assert (
        "".join([*map(stream.push, ids), stream.finish()]) == files.tokenizer.decode(ids) == native.decode(ids, False)
    )


def test_a_decoder_beside_gpt2s_counts(tmp_path: Path) -> None:
    folder = make("digits", tmp_path / "m")
    native = Native.from_file(str(folder / "tokenizer.json"))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    native.save(str(folder / "tokenizer.json"))
    files = read_tokenizer(folder)
    assert files.kind == "tokenizer-json"
    assert files.tokenizer.decode(files.tokenizer.encode(" It is")) == "It is"


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_classifier_keeps_the_tokens_around_a_text(class_name: str, tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    native = ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    native.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    native.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    alone, surrounded = read_tokenizer(tmp_path), read_tokenizer(tmp_path, surrounded=True)
    assert any("puts special tokens around a text" in note for note in alone.notes)
    assert not any("ortgpt encodes" in note for note in surrounded.notes)
    for text in ("It is a truth", " Emma", "é"):
        ids = theirs(text)["input_ids"]
        assert alone.tokenizer.encode(text) == alone.tokenizer.encode_surrounded(text) == ids[1:]
        assert surrounded.template is not None
        assert surrounded.template.surround(surrounded.tokenizer.encode(text)) == ids
    assert surrounded.template is not None
    assert (surrounded.kind, surrounded.template.pair) == ("byte-level-bpe", None)
