"""Read the vocabulary and the merges of a parsed tokenizer.json, and compare how it splits and joins with GPT-2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ortgpt.errors import listed, shown
from ortgpt.text.bpe_files import check_ids
from ortgpt_exporter.checkpoint.merge_check import Pair
from ortgpt_exporter.errors import ExportError

# Settings of a BPE in tokenizer.json that GPT-2 does not use.
_BPE_VARIANTS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
# GPT-2's split as `tokenizers` and GPT-2's own encoder.py write it, and as tiktoken writes it.
_PATTERNS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
_SPLITTERS = "ByteLevel, or a Sequence of Split by GPT-2's pattern and ByteLevel with use_regex = false"


def as_object(value: Any) -> dict[str, Any]:
    """Return a JSON object as it is, and an empty one in place of any other value."""
    return value if isinstance(value, dict) else {}


def other_than_gpt2(settings: Mapping[str, Any]) -> list[str]:
    """Return each setting of a tokenizer.json by which it splits or joins text otherwise than GPT-2."""
    model = as_object(settings.get("model"))
    faults = [
        f"{name} = {shown(value)} (GPT-2's: {own})"
        for name, value, is_own, own in (
            ("model.type", model.get("type"), model.get("type") in ("BPE", None), "BPE"),  # old files state none
            ("normalizer", settings.get("normalizer"), settings.get("normalizer") is None, "null"),
            *((f"model.{key}", model.get(key), not model.get(key), "null") for key in _BPE_VARIANTS),
            ("decoder", settings.get("decoder"), _joins_like_gpt2(settings.get("decoder")), "ByteLevel"),
        )
        if not is_own
    ]
    return [*faults, *_splitter_faults(settings.get("pre_tokenizer"))]


def _joins_like_gpt2(decoder: Any) -> bool:
    outer = as_object(decoder)
    steps = outer.get("decoders") if outer.get("type") == "Sequence" else [outer]
    kinds = [as_object(step).get("type") for step in steps] if isinstance(steps, list) else []
    return decoder is None or kinds == ["ByteLevel"]


def joins_bytes(settings: Mapping[str, Any]) -> bool:
    """Tell whether a tokenizer.json has a byte-level step, so that its tokens are written in GPT-2's letters."""
    parts = [as_object(settings.get(key)) for key in ("pre_tokenizer", "decoder")]
    inner = [part.get(key) for part in parts for key in ("pretokenizers", "decoders")]
    steps = [*parts, *(as_object(step) for each in inner if isinstance(each, list) for step in each)]
    return any(step.get("type") == "ByteLevel" for step in steps)


def read_bpe(settings: Mapping[str, Any], path: Path) -> tuple[dict[str, int], list[Pair]]:
    """Return the vocabulary and the merges of a tokenizer.json. Raises ExportError unless its model is a BPE."""
    model = as_object(settings.get("model"))
    vocab, merges = model.get("vocab"), model.get("merges")
    faults = []
    if model.get("type") not in ("BPE", None):
        faults.append(f"model.type = {shown(model['type'])} (accepted: BPE)")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        faults.append("model.vocab or model.merges is missing")
    if faults or not isinstance(vocab, dict) or not isinstance(merges, list):
        raise ExportError(f"{path}: this tokenizer is not supported: {listed(faults)}")
    pairs: list[Pair] = []
    for index, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise ExportError(f"{path}: model.merges[{index}] = {shown(merge)} (accepted: two tokens)")
        pairs.append((parts[0], parts[1]))
    return check_ids(vocab, source=f"model.vocab of {path}"), pairs


def _splitter_faults(splitter: Any) -> Iterator[str]:
    """Yield each setting of a pre_tokenizer that splits text otherwise than GPT-2."""
    outer = as_object(splitter)
    steps = outer.get("pretokenizers") if outer.get("type") == "Sequence" else [splitter]
    steps = [as_object(step) for step in steps] if isinstance(steps, list) else []
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        value = shown(kinds[0]) if len(kinds) == 1 else f"a Sequence of {shown(kinds)}"
        yield f"pre_tokenizer = {value} (GPT-2's: {_SPLITTERS})"
        return
    split, letters = steps[0], steps[-1]
    uses_regex = letters.get("use_regex", True)
    if uses_regex is not (len(steps) == 1):
        yield f"pre_tokenizer: use_regex = {shown(uses_regex)} (GPT-2's: {str(len(steps) == 1).lower()})"
    if letters.get("add_prefix_space"):
        yield f"pre_tokenizer: add_prefix_space = {shown(letters['add_prefix_space'])} (GPT-2's: false)"
    if len(steps) == 2:
        pattern = as_object(split.get("pattern")).get("Regex")
        if pattern not in _PATTERNS:
            yield f"pre_tokenizer splits by {split.get('pattern')!r:.300} (GPT-2's: {_PATTERNS[0]})"
        mode = (split.get("behavior"), bool(split.get("invert")))
        if mode not in (("Isolated", False), ("Removed", True)):  # both keep each match of the pattern, and no more
            yield f"pre_tokenizer: behavior and invert = {shown(mode)} (GPT-2's: Isolated and false)"
