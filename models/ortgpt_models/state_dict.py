"""Build a network in float32 from its stored tensors: check shapes, read, tie the head. Knows no file and no format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.gpt import GPT
from ortgpt_models.tensor_files import StoredTensor, faults_of, is_finite
from ortgpt_models.tensor_names import (
    EMBEDDING,
    HEAD,
    OLD_HEAD,
    NamedTensors,
    checkpoint_name,
    left_out,
    network_name,
)

_LAYER = re.compile(r"h\.(\d+)\.")


def parameter_names(config: GPTConfig) -> list[str]:
    """Return what checkpoints call a network's tensors, without that of an untied head."""
    return list(_shapes(replace(config, tie_word_embeddings=True)))


def assemble_gpt(config: GPTConfig, named: NamedTensors) -> GPT:
    """Build the network of `config`, in evaluation mode; `named` has no tensors afterwards, and perhaps more notes.

    A stored head that differs from the token embedding is taken even if `config` ties the two, as in `transformers` 5;
    one that equals it is tied even if `config` does not. If only the head is stored and `config` ties the two, it is
    the embedding, too. Raises ModelError with the faults in `named` and every missing, unexpected and misshapen tensor;
    or else with every tensor that holds NaN or infinity.
    """
    return assemble_with_head(config, named, {})[0]


def assemble_with_head(
    config: GPTConfig, named: NamedTensors, head_shapes: Mapping[str, tuple[int, ...]]
) -> tuple[GPT, dict[str, Tensor]]:
    """Do as assemble_gpt(), and also return the tensors of another head, of these shapes, by their names."""
    tensors, embedding = named.tensors, checkpoint_name(EMBEDDING, config.norm)
    if config.tie_word_embeddings and embedding not in tensors and HEAD in tensors:
        tensors[embedding] = tensors.pop(HEAD)
        named.notes.append(
            f"the token embedding is not stored; {tensors[embedding].key}, which is tied to it, was read"
        )
    old_head = tensors.pop(OLD_HEAD, None)
    shapes = _shapes(replace(config, tie_word_embeddings=config.tie_word_embeddings and HEAD not in tensors))
    shapes |= head_shapes
    faults = [*named.faults, *_misfits(config, shapes, tensors)]
    if faults:
        raise ModelError(f"the tensors do not fit the configuration: {'; '.join(faults)}")
    state = _read(shapes, tensors)
    head = {name: state.pop(name) for name in head_shapes}
    if HEAD in state and torch.equal(state[HEAD], state[embedding]):
        del state[HEAD]
    if old_head is not None and not _equals(old_head, state[embedding]):
        named.notes.append(left_out([old_head.key]))
    with torch.device("meta"):
        gpt = GPT(replace(config, tie_word_embeddings=HEAD not in state))
    gpt.load_state_dict({network_name(name): tensor for name, tensor in state.items()}, assign=True)
    return gpt.eval(), head


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = GPT(config).state_dict()
    return {checkpoint_name(name, config.norm): tuple(tensor.shape) for name, tensor in state.items()}


def _misfits(
    config: GPTConfig, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]
) -> list[str]:
    faults = [f"missing {name} {shape}" for name, shape in shapes.items() if name not in tensors]
    if HEAD in shapes and HEAD not in tensors:
        faults.append(
            "tie_word_embeddings = false says that the head is stored; set it to true if the token embedding is it"
        )
    for name, stored in tensors.items():
        if name in shapes:
            faults += faults_of(stored, shapes[name])
        else:
            layer = _LAYER.match(name)
            beyond = layer is not None and int(layer[1]) >= config.n_layer
            faults.append(f"unexpected {stored.key}" + (f" (n_layer = {config.n_layer})" if beyond else ""))
    return faults


def _equals(stored: StoredTensor, tensor: Tensor) -> bool:
    return not faults_of(stored, tuple(tensor.shape)) and torch.equal(stored.read(), tensor)


def _read(names: Iterable[str], tensors: dict[str, StoredTensor]) -> dict[str, Tensor]:
    """Read the tensors, and drop each stored one, so that two whole copies never exist at once."""
    state = {}
    faults = []
    for name in names:
        stored = tensors.pop(name)
        state[name] = stored.read()
        if not is_finite(state[name]):
            faults.append(f"{stored.key} holds NaN or infinity")
    if faults:
        raise ModelError(f"{'; '.join(faults)}; expected finite weights: take a checkpoint from before they were lost")
    return state
