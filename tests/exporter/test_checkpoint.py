from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Tokenizer

from ortgpt import BundleError
from ortgpt.tokenizer import Tokenizer, read_merges
from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint import (
    find_folder,
    load_checkpoint,
    load_tokenizer,
    read_tokenizer_files,
    unreachable_merges,
)
from ortgpt_models import ModelError
from support import write_checkpoint, write_real_tokenizer, write_small_tokenizer


@pytest.fixture
def folder(small_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_checkpoint, tmp_path / "my-model"))


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, read_tokenizer_files(folder))


def test_a_folder_gives_network_tokenizer_and_provenance(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Model\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 0}')
    loaded = load_checkpoint(folder)
    assert loaded.gpt.config.n_layer == 2
    assert loaded.tokenizer_vocab_size == 300
    assert loaded.tokenizer_files["vocab.json"] == (folder / "vocab.json").read_text()
    assert loaded.generation_config == {"temperature": 0.7, "eos_token_id": 0}
    assert (loaded.source.id, loaded.source.licence, loaded.source.revision) == ("my-model", "mit", None)
    assert loaded.source.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_without_a_generation_config_end_of_text_comes_from_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    loaded = load_checkpoint(folder)
    assert loaded.generation_config == {"bos_token_id": 0, "eos_token_id": 0}
    assert loaded.source.licence is None


def test_a_bundled_name_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "austen").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_folder("austen").name == "austen"
    assert find_folder("austen").parent.name == "checkpoints"
    for path in ("./austen", Path("./austen"), Path("austen"), tmp_path / "austen"):
        assert find_folder(path).resolve() == tmp_path / "austen"
    with pytest.raises(
        ModelError, match="none does not exist; expected a Hugging Face GPT-2 folder, or one of: austen"
    ):
        find_folder("none")


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: 'apache-2.0'\n---\n", "apache-2.0"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\nlicense:\ntags: x\n---\n", None),
        ("no front matter\nlicense: mit\n", None),
        ("---\nlicense: mit\n---\n\udcff", "mit"),
    ],
)
def test_the_licence_of_a_model_card(folder: Path, card: str, licence: str | None) -> None:
    (folder / "README.md").write_bytes(card.encode("utf-8", "surrogateescape"))
    assert load_checkpoint(folder).source.licence == licence


def test_added_tokens_are_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<|pad|>": 300, "<|endoftext|>": 0}')
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 301, "content": "<|sep|>", "special": true}]}')
    tokenizer = load(folder)
    assert tokenizer.vocab_size == 302
    assert tokenizer.decode([300, 301]) == "<|pad|><|sep|>"
    assert "<|sep|>" in json.loads(read_tokenizer_files(folder)["vocab.json"])
    with pytest.raises(ExportError, match="tokenizer has 302 ids, the model only 300 rows"):
        load_checkpoint(folder)
    wider = write_checkpoint(tmp_path / "wider", vocab_size=302)
    for name in ("added_tokens.json", "tokenizer.json"):
        shutil.copy(folder / name, wider)
    assert load_checkpoint(wider).tokenizer_vocab_size == 302
    (folder / "added_tokens.json").write_text('{"<|pad|>": 7}')
    with pytest.raises(ExportError, match=r"contradict vocab\.json: '<\|pad\|>' = 7"):
        load(folder)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json"])
@pytest.mark.parametrize("content", [b"\xff", b'{"\\ud800": 300}', b"[]"])
def test_tokenizer_files_that_are_no_text_are_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises((ExportError, BundleError), match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", '{"x": "y"}'),
        ("added_tokens.json", '{"x": null}'),
        ("tokenizer.json", '{"added_tokens": [7]}'),
        ("tokenizer.json", '{"added_tokens": {"id": 1}}'),
        ("tokenizer.json", '{"added_tokens": [{"id": true, "content": "x"}]}'),
    ],
)
def test_added_tokens_of_another_form_are_refused(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ExportError, match="expected a text and an integer"):
        load_checkpoint(folder)


def test_a_folder_as_transformers_saves_it_today(folder: Path, tmp_path: Path) -> None:
    tokenizer = GPT2Tokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|user|>"], special_tokens=True)
    wider = write_checkpoint(tmp_path / "wider", vocab_size=301)
    for name in ("vocab.json", "merges.txt"):
        (wider / name).unlink()
    tokenizer.save_pretrained(wider)
    assert not (wider / "vocab.json").exists()
    loaded = load_checkpoint(wider)
    assert loaded.tokenizer_vocab_size == 301
    text = "It is a truth, <|user|> — 日本"
    ours = load(wider)
    assert ours.encode(text, special_tokens=True) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text) == Tokenizer.load(folder).encode(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t["model"].update(type="WordPiece"), r"model\.type = 'WordPiece'"),
        (lambda t: t.update(normalizer={"type": "NFC"}), "normalizer = "),
        (lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space = True"),
        (lambda t: t.update(pre_tokenizer=None), r"pre_tokenizer\.type = None"),
        (lambda t: t["model"].update(dropout=0.1), r"dropout = 0\.1"),
        (lambda t: t["model"].pop("merges"), r"model\.merges is missing"),
        (lambda t: t.update(model=7), r"model\.type = None"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused(folder: Path, change: Callable[[Any], None], reason: str) -> None:
    GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "vocab.json").unlink()
    values = json.loads((folder / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ExportError, match=reason):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("generation_config.json", '{"eos_token_id": [0, 300]}', "bos_token_id or eos_token_id = 300"),
        ("generation_config.json", '{"temperature": "hot"}', r"generation_config\.json: temperature = 'hot'"),
    ],
)
def test_generation_defaults_that_would_fail_later_are_refused(
    folder: Path, name: str, content: str, reason: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ExportError, match=reason):
        load_checkpoint(folder)


def test_special_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "default", bos_token_id=50256, eos_token_id=50256)
    with pytest.raises(ExportError, match=r"= 50256 is not in the tokenizer \(accepted: 0 to 299, or null\)"):
        load_checkpoint(folder)


def test_a_model_smaller_than_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "small", vocab_size=290)
    with pytest.raises(ExportError, match="tokenizer has 300 ids, the model only 290 rows"):
        load_checkpoint(folder)


def test_missing_tokenizer_files_are_named(folder: Path) -> None:
    (folder / "merges.txt").unlink()
    with pytest.raises(ExportError, match=r"no merges\.txt in .*or as tokenizer\.json"):
        load_checkpoint(folder)


def test_holes_in_the_vocabulary_are_refused(folder: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text())
    last = max(vocab, key=lambda token: vocab[token])
    (folder / "vocab.json").write_text(json.dumps(vocab | {last: 305}))
    with pytest.raises(ExportError, match="id 299 has no token"):
        load(folder)


def test_merges_that_were_cut_short_are_noticed(folder: Path) -> None:
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (0, 1, len(lines) // 4):
        (folder / "merges.txt").write_text("".join(lines[:kept]), encoding="utf-8")
        with pytest.raises(ExportError, match=r"is made by no merge \(is merges\.txt complete\?\)"):
            load(folder)


def test_the_real_and_the_small_tokenizer_are_supported(tmp_path: Path) -> None:
    write_real_tokenizer(tmp_path)
    assert load(tmp_path).vocab_size == 50257
    write_small_tokenizer(tmp_path)
    assert load(tmp_path).vocab_size == 300


def test_merges_that_byte_ranks_cannot_reproduce_are_found(tmp_path: Path) -> None:
    assert unreachable_merges([("a", "b"), ("ab", "c"), ("c", "d")]) == []
    # "abc" is made of ab + c by rank, never of a + bc.
    assert unreachable_merges([("a", "b"), ("b", "c"), ("a", "bc")]) == [("a", "bc")]
    # The part "bc" of the merge is made by no merge before it.
    assert unreachable_merges([("a", "b"), ("a", "bc")]) == [("a", "bc")]
    # Two pairs for one token: a rank of joined text cannot tell them apart.
    assert unreachable_merges([("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")]) == [("a", "bc")]
    write_small_tokenizer(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    merges = read_merges(tmp_path / "merges.txt")
    left, right = next((left, right) for left, right in merges if len(left + right) == 3 and len(right) == 1)
    odd = (left[0], left[1] + right)
    vocab |= {"".join(odd): len(vocab), left[1] + right: len(vocab) + 1}
    vocab = {token: index for index, token in enumerate(vocab)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    lines = [*merges, (left[1], right), odd]
    (tmp_path / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in dict.fromkeys(lines)))
    with pytest.raises(ExportError, match=r"not supported: merge .* is never reached"):
        load(tmp_path)
