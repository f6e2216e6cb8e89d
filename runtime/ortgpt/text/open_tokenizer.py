"""Open the tokenizer of a bundle by the kind that its manifest names. Knows no manifest."""

from __future__ import annotations

from pathlib import Path

from ortgpt.contract import File, TokenizerKind
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt.text.ids_only import IdsOnly
from ortgpt.text.tokenizer import Tokenizer


def open_tokenizer(folder: Path, kind: str, *, rows: int) -> Tokenizer:
    """Open the tokenizer of `kind` in `folder`; without one, every one of the model's `rows` that it may pick is an id.

    Raises BundleError for a file that is missing or damaged.
    """
    if kind == TokenizerKind.NONE:
        return IdsOnly(rows)
    if kind == TokenizerKind.TOKENIZER_JSON:
        from ortgpt.text.json_tokenizer import JsonTokenizer

        return JsonTokenizer.load(folder / File.TOKENIZER)
    return ByteLevelBPE.load(folder)
