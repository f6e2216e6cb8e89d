"""Files of a checkpoint that are none, or are not what they should be."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortgpt_exporter.checkpoint.load import load_checkpoint
from ortgpt_models import ModelError, load_gpt
from ortgpt_models.files import MAX_JSON_BYTES, file_is_there, read_json_object
from support import write_checkpoint

NO_FILES: list[Callable[[Path], Any]] = [
    os.mkfifo,
    os.mkdir,
    lambda path: path.symlink_to(path.parent / "nowhere"),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
]


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "vocab.json", "added_tokens.json",
     "tokenizer_config.json", "README.md"],
)  # fmt: skip
def test_what_is_no_file_is_neither_read_nor_passed_over(
    name: str, make: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ModelError, match=f"{re.escape(name)} is no file"):
        load_checkpoint(folder)


def test_a_checkpoint_that_is_neither_folder_nor_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="pipe is neither a folder nor a file"):
        load_checkpoint(tmp_path / "pipe", tokenizer="austen")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"n_layer": 1, "n_layer": 2}', "the key 'n_layer' stands twice"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' stands twice"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds a JSON list"),
    ],
)
def test_json_that_is_no_plain_object_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        load_gpt(folder)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match=r"config\.json has 33,554,433 bytes; at most 33,554,432 are read"):
        read_json_object(path, "a folder")
    assert file_is_there(path)
    assert not file_is_there(tmp_path / "none")
