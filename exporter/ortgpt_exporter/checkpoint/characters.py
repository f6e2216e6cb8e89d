"""Read the characters of a nanoGPT model, meta.pkl, without executing it, and make a tokenizer of them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ortgpt.contract import File, TokenizerKind
from ortgpt.errors import shown
from ortgpt.text.bpe_files import MAX_IDS
from ortgpt.text.json_tokenizer import JsonTokenizer
from ortgpt_exporter.checkpoint.tokenizer_folder import TokenizerFiles
from ortgpt_exporter.errors import ExportError

CHARACTERS = "meta.pkl"
_MAX_SIZE_BYTES = 2**25


def read_characters(path: Path) -> TokenizerFiles:
    """Read nanoGPT's meta.pkl: an id for each character. Raises ExportError for anything else, and OSError."""
    ids = _read_ids(path)
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=""))  # another character is an error, as in nanoGPT
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    text = str(tokenizer.to_str())
    return TokenizerFiles(
        kind=TokenizerKind.TOKENIZER_JSON,
        texts={File.TOKENIZER: text},
        vocab=ids,
        tokenizer=JsonTokenizer(text, source=str(path)),
        tokenizer_json=text,
        notes=(
            "the bundle needs the package tokenizers (extra [tokenizers]) wherever it runs: its tokens are the "
            f"{len(ids):,} characters of {path.name}, which was read without executing it",
        ),
    )


def _read_ids(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    if size > _MAX_SIZE_BYTES:
        raise ExportError(f"{path} has {size:,} bytes (accepted: at most {_MAX_SIZE_BYTES:,})")
    try:
        values = _Plain(io.BytesIO(path.read_bytes())).load()
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001  # a damaged pickle raises nearly any
        raise ExportError(f"{path} is no readable pickle: {type(error).__name__}: {error}") from None
    ids = values.get("stoi") if isinstance(values, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise ExportError(f"{path} holds {shown(values)} (accepted: nanoGPT's meta.pkl, with an object `stoi`)")
    for character, token_id in ids.items():
        is_one = isinstance(character, str) and len(character) == 1 and not "\ud800" <= character <= "\udfff"
        if not is_one or type(token_id) is not int or not 0 <= token_id < MAX_IDS:
            raise ExportError(f"{path} maps {shown(character)} to {shown(token_id)} (accepted: a character to an id)")
    if len({*ids.values()}) != len(ids):
        raise ExportError(f"{path} gives two characters the same id")
    return dict(ids)


class _Plain(pickle._Unpickler):
    """Reads a pickle of dicts, texts and numbers. Written in Python, so a small file cannot take much memory."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every global: calling one is how a pickle runs code."""
        raise ExportError(f"it wants to use {shown(f'{module}.{name}')} (accepted: dicts, texts and numbers)")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse objects that lie elsewhere."""
        raise ExportError("it refers to an object outside the file")
