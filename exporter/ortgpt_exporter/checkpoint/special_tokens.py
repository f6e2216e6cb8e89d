"""Find the special tokens that a tokenizer's files declare, and number those without an id. Reads no file.

`transformers` 5 gives a declared token that has no id the next free one: first the named tokens (bos_token and so on,
in its own order), then those that have a name of their own, then the extra ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ortgpt.errors import shown
from ortgpt_exporter.errors import ExportError

SPECIAL_TOKENS_MAP = "special_tokens_map.json"

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _EXTRA_BEFORE_V5, _OWN = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
# What classes of `transformers` take for the names that no file mentions.
_GPT2_DEFAULTS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_DEFAULTS = {
    "": _GPT2_DEFAULTS,
    "GPT2Tokenizer": _GPT2_DEFAULTS,
    "GPT2TokenizerFast": _GPT2_DEFAULTS,
    "OpenAIGPTTokenizer": {"unk_token": "<unk>"},
    "BertTokenizer": {
        "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
    },
}  # fmt: skip


def declared_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any], class_name: str) -> list[dict[str, Any]]:
    """Return the special tokens that tokenizer_config.json and special_tokens_map.json declare, in order of their ids.

    Each is an object with its text as `content`. `class_name` is the class that the folder names for its tokenizer, or
    empty: GPT-2's own declares end-of-text where the files say nothing, and others have their own. The map counts only
    beside a configuration without `added_tokens_decoder`, as in `transformers`. Raises ExportError for a token that is
    not a text.
    """
    values, own = _merged(config, {} if "added_tokens_decoder" in config else special_map)
    defaults = _DEFAULTS.get(class_name, {})
    named = [values.get(key, defaults.get(key)) for key in _NAMED]
    late = {key: value for key, value in values.items() if _is_own_name(key) and _is_token(value)}
    extra = values.get(_EXTRA) or []
    entries = [*named, *(late | own).values(), *(extra if isinstance(extra, list) else [extra])]
    wrong = [value for value in entries if value not in (None, "") and not _is_token(value)]
    if wrong:
        raise ExportError(
            f"a special token is {shown(wrong[0])} (accepted: a text, or an object with one as `content`)"
        )
    return [value if isinstance(value, dict) else {"content": value} for value in entries if value]


def token_roles(
    config: Mapping[str, Any], special_map: Mapping[str, Any], class_name: str | None = None
) -> dict[str, str]:
    """Return the text of each named token that the files declare, by its name: {"pad_token": "<|pad|>"}.

    With `class_name`, that class's own count where the files say nothing.
    """
    values, _ = _merged(config, {} if "added_tokens_decoder" in config else special_map)
    values = (_DEFAULTS.get(class_name, {}) if class_name is not None else {}) | values
    named = {key: values[key] for key in _NAMED if _is_token(values.get(key))}
    return {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}


def number_tokens(tokens: Iterable[Mapping[str, Any]], vocab: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens whose text `vocab` does not have, each with the next free id."""
    texts = dict.fromkeys(token["content"] for token in tokens)
    free = max(vocab.values(), default=-1) + 1
    return {text: free + index for index, text in enumerate(text for text in texts if text not in vocab)}


def _merged(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what both files say (the map wins), and the tokens that have a name of their own."""
    values = dict(config)
    if _EXTRA_BEFORE_V5 in values and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_EXTRA_BEFORE_V5)
    own = {key: values.pop(key) for key in [*values] if _is_own_name(key) and isinstance(values[key], str)}
    own |= _pop_object(values, _EXTRA)
    own = own or _pop_object(values, _OWN)
    for key, value in special_map.items():
        before = values.get(_EXTRA)
        if key == _EXTRA and isinstance(value, list) and isinstance(before, list):
            value = [*before, *value]
        values[key] = value
    own |= _pop_object(values, _EXTRA)
    if _EXTRA_BEFORE_V5 in values and _EXTRA not in values:
        values[_EXTRA] = values[_EXTRA_BEFORE_V5]
    return values, own


def _pop_object(values: dict[str, Any], key: str) -> dict[str, Any]:
    return values.pop(key) if isinstance(values.get(key), dict) else {}


def _is_own_name(key: str) -> bool:
    return key.endswith("_token") and key not in _NAMED


def _is_token(value: Any) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    return isinstance(text, str) and bool(text)
