"""nanoGPT's meta.pkl: its characters as a tokenizer, and pickles that are refused without being executed."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ortgpt
from ortgpt import PromptError
from ortgpt.errors import shown
from ortgpt_exporter import CheckpointSource, ExportError, export_bundle
from ortgpt_exporter.checkpoint.characters import read_characters
from ortgpt_models import GPT, GPTConfig
from support import TEXT


def meta(text: str = TEXT) -> dict[str, Any]:
    """Return what nanoGPT's prepare.py of a text of characters pickles."""
    characters = sorted(set(text))
    stoi = {character: number for number, character in enumerate(characters)}
    return {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi}


def write(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def write_nanogpt(path: Path, vocab_size: int) -> None:
    """Write a ckpt.pt in the form in which nanoGPT's train.py does."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=vocab_size, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {
        f"transformer.{name}": tensor.T.contiguous() if name.endswith(transposed) else tensor
        for name, tensor in gpt.state_dict().items()
        if not name.startswith("lm_head")
    }
    state["lm_head.weight"] = gpt.wte.weight
    args = {"vocab_size": vocab_size, "block_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bias": True}
    torch.save({"model": state, "model_args": args | {"dropout": 0.0}}, path)


def test_ids_are_those_of_nanogpt(tmp_path: Path) -> None:
    values = meta()
    files = read_characters(write(tmp_path / "meta.pkl", values))
    assert files.tokenizer.encode(TEXT) == [values["stoi"][character] for character in TEXT]
    ids = files.tokenizer.encode(TEXT)
    assert files.tokenizer.decode(ids) == "".join(values["itos"][token_id] for token_id in ids) == TEXT
    stream = files.tokenizer.stream(ids[:3])
    assert [stream.push(token_id) for token_id in ids[3:]] == list(TEXT[3:])
    characters = "".join(sorted(values["stoi"]))
    for text, character, place in (("Ж", "Ж", 0), (f"It{TEXT}ß Ж", "ß", 2 + len(TEXT)), ("It is 5", "5", 6)):
        assert character not in characters
        with pytest.raises(PromptError) as caught:
            files.tokenizer.encode(text)
        assert str(caught.value) == (
            f"the tokenizer has no token for {character!r}, at character {place} of the text "
            f"(accepted: its {len(characters)} characters, {shown(characters)})"
        )
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(values, protocol))
        assert read_characters(tmp_path / "meta.pkl").vocab == values["stoi"]


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ortgpt-was-executed",)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Bomb(), "it wants to use '(posix|nt).system'"),
        (OrderedDict(stoi={"a": 0}), r"it wants to use 'collections\.OrderedDict'"),
        ({"stoi": {"ab": 0}}, r"maps 'ab' to 0 \(accepted: a character to an id\)"),
        ({"stoi": {"a": "0"}}, "maps 'a' to '0'"),
        ({"stoi": {"a": -1}}, "maps 'a' to -1"),
        ({"stoi": {"a": True}}, "maps 'a' to True"),
        ({"stoi": {"\ud800": 0}}, "maps .*d800"),
        ({"stoi": {"a": 0, "b": 0}}, "two characters the same id"),
        ({"stoi": {}}, r"accepted: nanoGPT's meta\.pkl"),
        ([1], r"holds \[1\]"),
    ],
)
def test_other_pickles_are_refused(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=reason) as caught:
        read_characters(write(tmp_path / "meta.pkl", value))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not os.path.exists("/tmp/ortgpt-was-executed")


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x04.", b"\x80\x04r\xff\xff\xff\x7f.", pickle.dumps(meta())[:-9]])
def test_damaged_pickles_are_one_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(data)
    with pytest.raises(ExportError, match="is no readable pickle") as caught:
        read_characters(tmp_path / "meta.pkl")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_its_characters_beside_it(tmp_path: Path) -> None:
    values = meta()
    write_nanogpt(tmp_path / "ckpt.pt", values["vocab_size"])
    with pytest.raises(
        ExportError, match=r"carries no tokenizer; .*, its meta\.pkl, .* or none for a bundle of token ids"
    ):
        export_bundle(tmp_path / "ckpt.pt", tmp_path / "bundle")
    ids = [values["stoi"][character] for character in "It is"]
    with ortgpt.load(
        export_bundle(CheckpointSource(tmp_path / "ckpt.pt", tokenizer="none"), tmp_path / "none").path
    ) as generator:
        new = generator.generate(ids, max_new_tokens=8).token_ids
    write(tmp_path / "meta.pkl", values)
    for source in (tmp_path / "ckpt.pt", CheckpointSource(tmp_path / "ckpt.pt", tokenizer=tmp_path / "meta.pkl")):
        bundle = export_bundle(source, tmp_path / "bundle", force=True)
        with ortgpt.load(bundle.path) as generator:
            done = generator.generate("It is", max_new_tokens=8)
            assert done.token_ids == new
            assert done.text == "".join(values["itos"][token_id] for token_id in new)
