"""Find a network's tensors among the keys of a file: below prefixes of wrappers, and beside heads of other tasks.

Knows no file and no shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ortgpt_models.config import POST, PRE
from ortgpt_models.errors import ModelError
from ortgpt_models.tensor_files import StoredTensor

EMBEDDING, HEAD = "wte.weight", "lm_head.weight"
OLD_HEAD = "lm_head.decoder.weight"  # in the first DialoGPT files, where it is always the embedding

_BASE = "transformer."  # what `transformers` puts before every tensor but the head's, and OpenAI does not
_IN_GPT1 = {"wte": "tokens_embed", "wpe": "positions_embed"}  # what GPT-1 calls the embeddings of `GPT`
_ROOTS = ("wte", "wpe", "h", "ln_f", *_IN_GPT1.values())
# Causal masks that old `transformers` and nanoGPT stored as buffers of each layer; the mask is not a weight.
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_MAX_LISTED = 6


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of one network."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """By their names in checkpoints; names that the network does not have, too, if they lie inside it."""
    faults: list[str] = field(default_factory=list)
    """Names that two keys share."""
    notes: list[str] = field(default_factory=list)
    """What was left out: a prefix, tensors beside the network."""


def checkpoint_name(name: str, norm: str) -> str:
    """Return what a checkpoint calls a tensor of a `GPT` with this place of the LayerNorm, without `transformer.`."""
    root, dot, rest = name.partition(".")
    return (_IN_GPT1.get(root, root) if norm == POST else root) + dot + rest


def key_of(name: str, norm: str) -> str:
    """Return the key under which `transformers` stores a tensor of a `GPT` with this place of the LayerNorm."""
    return name if name == HEAD else _BASE + checkpoint_name(name, norm)


def network_name(name: str) -> str:
    """Return the name in `GPT` of a tensor that checkpoints call `name`."""
    root, dot, rest = name.partition(".")
    return next((ours for ours, theirs in _IN_GPT1.items() if theirs == root), root) + dot + rest


def name_tensors(
    stored: Mapping[str, StoredTensor],
    required: Collection[str],
    *,
    usual_wrapper: str = "",
    heads: Collection[str] = (),
) -> NamedTensors:
    """Return the tensors of the network that has all the names in `required`, except perhaps the token embedding.

    Names are those of checkpoints (see checkpoint_name).
    A prefix that wrappers left before the whole network (`module.`, `_orig_mod.`, `model.`) is removed. Tensors outside
    the network, such as the head of a classifier, are left out, as `transformers` leaves them out. Causal masks are
    left out without a note, and so is the prefix `usual_wrapper`. `heads` are the names of tensors that are taken from
    beside the network, instead of the language model's head. Raises ModelError if the file holds no such network
    or several, or pieces of one under different prefixes.
    """
    wrapper = _find_wrapper(stored, required)
    named = NamedTensors()
    beside = []
    for key, tensor in stored.items():
        name = _name_inside(key, wrapper)
        if name is None:
            beside.append(key)
        elif name in named.tensors:
            named.faults.append(f"{name} occurs twice, as {named.tensors[name].key} and {key}")
        elif not MASK_BUFFERS.fullmatch(name):
            named.tensors[name] = tensor
    # A model that calls its network otherwise than `transformer` has its head beside it, perhaps levels further out.
    outer_head = next((key for key in (parent + HEAD for parent in _parents(wrapper)) if key in beside), None)
    if heads:
        _take_heads(named, stored, beside, heads, wrapper)
    elif outer_head is not None and HEAD not in named.tensors:
        beside.remove(outer_head)
        named.tensors[HEAD] = stored[outer_head]
    if wrapper != usual_wrapper and wrapper:
        example = next(tensor.key for name, tensor in named.tensors.items() if name in required)
        named.notes.append(f"the prefix {wrapper} before the network's tensors, as in {example}, was left out")
    if beside:
        named.notes.append(left_out(beside))
    return named


def _take_heads(
    named: NamedTensors, stored: Mapping[str, StoredTensor], beside: list[str], heads: Collection[str], wrapper: str
) -> None:
    """Move the tensors called `heads` from `beside` to `named`, and the language model's head the other way."""
    for name in heads:
        key = next((key for key in (parent + name for parent in (wrapper, *_parents(wrapper))) if key in beside), None)
        if key is not None:
            beside.remove(key)
            named.tensors[name] = stored[key]
    beside += [named.tensors.pop(name).key for name in (HEAD, OLD_HEAD) if name in named.tensors]


def left_out(keys: Collection[str]) -> str:
    """Return the note on tensors that are no part of the network."""
    return f"left out, as no part of the network: {listed(keys)}"


def listed(names: Collection[str]) -> str:
    """Return names separated by commas; of many, the first and how many more there are."""
    first = list(names)[:_MAX_LISTED]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _find_wrapper(keys: Collection[str], required: Collection[str]) -> str:
    """Return the prefix of the network, without the `transformer.` that belongs to its tensors."""
    names_under: dict[str, set[str]] = {}
    for key in keys:
        place = _place_of(key, required)
        if place is not None:
            names_under.setdefault(place[0], set()).add(place[1])
    embeddings = {checkpoint_name(EMBEDDING, norm) for norm in (PRE, POST)}
    if not names_under:
        examples = [*embeddings.intersection(required), "h.0.attn.c_attn.weight"]
        raise ModelError(
            f"none of the {len(keys)} tensors is one of this network, which has {' and '.join(examples)}; "
            f"found: {listed(keys) or 'none'}"
        )
    wanted = set(required) - embeddings  # which the head can stand for
    whole = [wrapper for wrapper, names in names_under.items() if wanted <= names]
    if "" in whole:  # where `transformers` looks
        return ""
    if len(whole) > 1:
        raise ModelError(
            f"holds {len(whole)} networks, with the prefixes {', '.join(sorted(whole))}; keep the tensors of one, and "
            "remove its prefix"
        )
    if whole:
        return whole[0]
    largest = max(names_under, key=lambda wrapper: len(names_under[wrapper]))
    missing = wanted - names_under[largest]
    if any(missing & names for wrapper, names in names_under.items() if wrapper != largest):
        counts = ", ".join(f"{len(names)} with {wrapper or 'none'}" for wrapper, names in sorted(names_under.items()))
        raise ModelError(
            f"the network's {len(required)} tensors have different prefixes ({counts}); give all of them the same one, "
            "or none"
        )
    return largest


def _place_of(key: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return the wrapper's prefix and the name in the network of a key that ends with one of `names`."""
    begin = 0
    while key[begin:] not in names:
        begin = key.find(".", begin) + 1
        if begin == 0:
            return None
    prefix = key[:begin]
    is_based = prefix == _BASE or prefix.endswith(f".{_BASE}")
    return prefix.removesuffix(_BASE) if is_based else prefix, key[begin:]


def _name_inside(key: str, wrapper: str) -> str | None:
    """Return the name of a key in the network below `wrapper`; None if it lies outside it."""
    if not key.startswith(wrapper):
        return None
    name = key[len(wrapper) :]
    if name.startswith(_BASE):
        return name.removeprefix(_BASE)
    return name if name.partition(".")[0] in _ROOTS or name in (HEAD, OLD_HEAD) else None


def _parents(prefix: str) -> Iterator[str]:
    """Yield a prefix without its last part, without its last two, and so on: of "a.b.", "a." and ""."""
    while prefix:
        prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
        yield prefix
