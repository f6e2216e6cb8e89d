"""Every reader of a text decides alike what its first bytes mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortgpt.bundle.files import decode_text
from ortgpt_exporter import ExportError
from ortgpt_exporter.texts import read_utf8
from ortgpt_models import ModelError
from ortgpt_models.files import read_text

TEXT = "Café \ufeff 日本\r\n"


@pytest.mark.parametrize("text", [TEXT, "", "\ufeff", f"\ufeff{TEXT}"])
def test_one_byte_order_mark_at_the_beginning_is_left_out(text: str, tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / "text").write_bytes(data)
    assert decode_text(data, "it") == text
    assert read_utf8(tmp_path / "text") == text
    assert read_text(tmp_path / "text") == text.replace("\r\n", "\n")
    assert decode_text(TEXT.encode(), "it") == TEXT


@pytest.mark.parametrize(
    ("encoding", "mark", "named"),
    [
        ("utf-16-le", b"\xff\xfe", "UTF-16"),
        ("utf-16-be", b"\xfe\xff", "UTF-16"),
        ("utf-32-le", b"\xff\xfe\0\0", "UTF-32"),
        ("utf-32-be", b"\0\0\xfe\xff", "UTF-32"),
    ],
)
def test_another_encoding_is_named_by_its_mark(encoding: str, mark: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(mark + TEXT.encode(encoding))
    for read, kind in ((read_utf8, ExportError), (read_text, ModelError)):
        with pytest.raises(kind, match=rf"text is {named} text by its byte-order mark.* iconv -f {named} -t UTF-8"):
            read(path)
    with pytest.raises(ValueError, match=f"^it is {named} text"):
        decode_text(path.read_bytes(), "it")


def test_bytes_of_no_known_encoding(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"caf\xe9")
    for read, kind in ((read_utf8, ExportError), (read_text, ModelError)):
        with pytest.raises(kind, match=r"text is not UTF-8 text: .*0xe9 in position 3.*; convert it first"):
            read(tmp_path / "text")
