"""Files of a checkpoint that are damaged, or that are not files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortgpt_models import ModelError, load_gpt
from ortgpt_models.files import MAX_JSON_BYTES, file_is_there, read_json_object
from support import write_checkpoint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"n_layer": 1, "n_layer": 2}', "the key 'n_layer' occurs twice"),
        ('{"a": {"b": 1, "b": 1}}', "the key 'b' occurs twice"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds a JSON list"),
    ],
)
def test_json_that_is_not_a_plain_object_is_refused(text: str, reason: str, tmp_path: Path) -> None:
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


def test_what_is_not_a_file_is_neither_read_nor_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "folder", "link"):
        with pytest.raises(ModelError, match=f"{name} is not a file"):
            file_is_there(tmp_path / name)
