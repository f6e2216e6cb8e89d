"""Know how the `decoder` of a tokenizer.json makes text of tokens: what may be streamed, and how. Runs no decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_FUSE, _BYTE_FALLBACK, _BYTE_LEVEL = "Fuse", "ByteFallback", "ByteLevel"
# Steps that turn a token into text by itself, by whether it is the first, and by its neighbours.
_LOCAL = ("WordPiece", "BPEDecoder", "Metaspace", "CTC", "Replace", "Strip", _BYTE_FALLBACK)


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    inner = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return [step for step in inner if isinstance(step, dict)] if isinstance(inner, list) else []


def are_bytes(decoder: Any) -> bool:
    """Tell whether the decoder joins the bytes of tokens, as GPT-2's does, and does nothing else."""
    return [step.get("type") for step in _steps(decoder)] == [_BYTE_LEVEL]


def depends_on_neighbours_only(decoder: Any) -> bool:
    """Tell whether what a token adds to a text depends on the token before it only, beside whether it is the first.

    Other decoders, such as one that replaces a pattern in the whole text, may change what is already written. A run of
    tokens that are bytes counts as one token.
    """
    is_fused = False
    for step in _steps(decoder):
        kind = step.get("type")
        if kind == _FUSE:
            is_fused = True
        elif kind not in _LOCAL or (is_fused and not _is_local_on_text(step)):
            return False
    return True


def _is_local_on_text(step: Mapping[str, Any]) -> bool:
    """Tell whether a step on the joined text changes only its first character, or single characters."""
    if step.get("type") == "Strip":
        return step.get("start", 0) in (0, 1) and step.get("stop") == 0
    pattern = step.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    return step.get("type") == "Replace" and isinstance(literal, str) and len(literal) == 1


def byte_run_ids(decoder: Any, tokens: Mapping[int, str]) -> frozenset[int]:
    """Return the ids of tokens that are a byte, as <0xE6>: a run of them is decoded as a whole."""
    if not any(step.get("type") == _BYTE_FALLBACK for step in _steps(decoder)):
        return frozenset()
    return frozenset(token_id for token_id, token in tokens.items() if _BYTE.fullmatch(token))
