"""Tokenizer files under other names: which are taken, and what is said of the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from exporter.checkpoint.hub_server import folder_repo, serve_hub, use_hub
from ortgpt.contract import TokenizerKind
from ortgpt_exporter import CheckpointSource, ExportError
from ortgpt_exporter.checkpoint.load import load_checkpoint
from ortgpt_exporter.checkpoint.tokenizer_files import read_tokenizer
from support import TEXT, write_small_tokenizer

OPENAI = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_small_tokenizer(folder)
    return folder


def rename(folder: Path, names: dict[str, str]) -> None:
    for name, other in names.items():
        (folder / name).rename(folder / other)


@pytest.mark.parametrize("names", [OPENAI, {"vocab.json": "encoder.json"}, {"merges.txt": "vocab.bpe"}])
def test_openai_names_are_read(names: dict[str, str], folder: Path) -> None:
    usual = read_tokenizer(folder)
    rename(folder, names)
    files = read_tokenizer(folder)
    assert files.texts == usual.texts
    assert files.tokenizer.encode(TEXT) == usual.tokenizer.encode(TEXT)


def test_the_usual_names_come_first(folder: Path) -> None:
    (folder / "encoder.json").write_text("{}")
    (folder / "vocab.bpe").write_text("a b\n")
    assert read_tokenizer(folder).tokenizer.vocab_size == 300


def test_a_whole_tokenizer_of_any_name_is_taken(folder: Path, small_checkpoint: Path, tmp_path: Path) -> None:
    expected = read_tokenizer(folder)
    path = tmp_path / "aitextgen.tokenizer.json"
    ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save(str(path))
    files = load_checkpoint(CheckpointSource(small_checkpoint, tokenizer=path)).tokenizer_files
    assert files.vocab == expected.vocab
    assert files.tokenizer.encode(TEXT) == expected.tokenizer.encode(TEXT)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    assert read_tokenizer(other).kind == TokenizerKind.TOKENIZER_JSON
    other.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "None"}}))
    with pytest.raises(ExportError, match=r"other\.json: this tokenizer is damaged, or of a kind"):
        read_tokenizer(other)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["spiece.model"], "(found: spiece.model is a SentencePiece model, which cannot be used)"),
        (["spiece.model", "tokenizer_config.json"], "(found: spiece.model is a SentencePiece model"),
        (["sentencepiece.bpe.model"], "sentencepiece.bpe.model is a SentencePiece model, which cannot be used"),
        (["tokenizer.model"], "tokenizer.model is a SentencePiece model, or one of tiktoken, which cannot be used"),
        (["gpt2.tiktoken"], "gpt2.tiktoken is ranks of tiktoken, which cannot be used"),
        (["meta.pkl"], "meta.pkl is the characters of a nanoGPT model; to use them, name the file (--tokenizer "),
        (["my-vocab.json", "my-merges.txt"], "my-merges.txt is merges, to be renamed to merges.txt; my-vocab.json is"),
        (["merges.json", "vocab.json"], "merges.json is merges as JSON, to be written to merges.txt as one pair a"),
        (["aitextgen.tokenizer.json"], "is a tokenizer in one file; to use it, name the file (--tokenizer "),
        (["my_tokenizer.json"], "tokenizer/my_tokenizer.json)"),
    ],
)  # fmt: skip
def test_what_lies_there_is_said(names: list[str], said: str, folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name in names:
        (folder / name).write_text("{}")
    with pytest.raises(ExportError) as caught:
        read_tokenizer(folder)
    missing = "no merges.txt in" if "vocab.json" in names else "no vocab.json and no merges.txt in"
    assert str(caught.value).startswith(missing)
    assert said in str(caught.value)
    end = "or give --tokenizer none for a bundle that takes and gives token ids"
    assert str(caught.value).endswith(f"name its folder (--tokenizer FOLDER, tokenizer=), {end}")


def test_the_hub_has_these_names_too(
    folder: Path, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(folder, OPENAI)
    openai = Path(shutil.copytree(small_checkpoint, tmp_path / "openai"))
    rename(openai, OPENAI)
    (openai / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>"}')
    chinese = Path(shutil.copytree(small_checkpoint, tmp_path / "chinese"))
    for name in ("vocab.json", "merges.txt"):
        (chinese / name).unlink()
    (chinese / "vocab.txt").write_text("[UNK]\n")
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("[UNK]\n")
    with serve_hub() as hub:
        for path in (folder, openai, chinese, bert):
            hub.repos[f"me/{path.name}"] = folder_repo(path)
        use_hub(hub, tmp_path / "home", monkeypatch)
        loaded = load_checkpoint(CheckpointSource("me/openai"))
        assert loaded.tokenizer_files.tokenizer.vocab_size == 300
        assert any("'<|pad|>' = 300" in note for note in loaded.notes)
        assert load_checkpoint(CheckpointSource("me/chinese", tokenizer="me/tokenizer")).notes == ()
        for source in (CheckpointSource("me/chinese"), CheckpointSource("me/chinese", tokenizer="me/bert")):
            files = load_checkpoint(source).tokenizer_files
            assert files.kind == TokenizerKind.TOKENIZER_JSON
            assert files.vocab == {"[UNK]": 0, "[SEP]": 1, "[PAD]": 2, "[CLS]": 3, "[MASK]": 4}
