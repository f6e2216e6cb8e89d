"""What the runtime needs of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortgpt.contract import File
from ortgpt.errors import BundleError, listed, shown

_MAX = 2**31 - 1  # the largest number that the graph can count to
_MAX_LAYERS = 4096  # more is a mistake, and listing the names of their tensors would take forever


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the runtime needs of config.json; the names are Hugging Face's."""

    n_layer: int
    n_head: int
    n_positions: int
    """The context, in tokens."""
    vocab_size: int
    """The rows of the embedding, masked ones included."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """At most one."""
    tie_word_embeddings: bool = True
    """Whether the head is the token embedding; the graph holds it either way."""

    @property
    def start_id(self) -> int | None:
        """The id that precedes all text: beginning-of-text, or end-of-text, which GPT-2 uses as both. None: neither."""
        return next((each for each in (self.bos_token_id, *self.eos_token_ids) if each is not None), None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json. Raises BundleError that names every value that does not fit."""
        counts: dict[str, Any] = {name: values.get(name) for name in ("n_layer", "n_head", "n_positions", "vocab_size")}
        faults = [
            f"{name} = {shown(value)} (accepted: an integer from 1 to {_max(name)})"
            for name, value in counts.items()
            if type(value) is not int or not 1 <= value <= _max(name)
        ]
        vocab_size = counts["vocab_size"] if type(counts["vocab_size"]) is int else 0
        special = {name: values.get(name) for name in ("bos_token_id", "eos_token_id")}
        faults += [
            f"{name} = {shown(value)} (accepted: null or an id of the vocabulary)"
            for name, value in special.items()
            if value is not None and not (type(value) is int and 0 <= value < vocab_size)
        ]
        if faults:
            raise BundleError(f"{File.CONFIG} has faults: {listed(faults)}")
        eos = special["eos_token_id"]
        return cls(
            **counts,
            bos_token_id=special["bos_token_id"],
            eos_token_ids=() if eos is None else (eos,),
            tie_word_embeddings=values.get("tie_word_embeddings") is not False,
        )


def _max(name: str) -> int:
    return _MAX_LAYERS if name == "n_layer" else _MAX
