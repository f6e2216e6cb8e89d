"""Build a network in float32 from stored tensors: match names, check shapes. Knows no file and no format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.gpt import GPT
from ortgpt_models.tensor_files import StoredTensor, faults_of, is_finite

# Names of a stored head, which is not a parameter of `GPT`: today's, and that of the first DialoGPT files.
HEADS = ("lm_head.weight", "lm_head.decoder.weight")
# Causal masks that old `transformers` and nanoGPT stored as buffers of each layer; the mask is not a weight.
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def name_tensors(
    tensors: Mapping[str, StoredTensor], prefix: re.Pattern[str]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors by their names in `GPT`, which are their keys without a leading `prefix`, and all faults.

    Masks are left out. A fault is a name that two keys share.
    """
    named: dict[str, StoredTensor] = {}
    faults = []
    for key, stored in tensors.items():
        match = prefix.match(key)
        name = key[match.end() :] if match else key
        if name in named:
            faults.append(f"{name} occurs twice, as {named[name].key} and {key}")
        if not MASK_BUFFERS.fullmatch(name):
            named[name] = stored
    return named, faults


def assemble_gpt(config: GPTConfig, tensors: dict[str, StoredTensor], faults: Iterable[str] = ()) -> GPT:
    """Build the network of `config` from `tensors` by name, in evaluation mode; `tensors` is empty afterwards.

    Raises ModelError with `faults` and every missing, unexpected and misshapen tensor; or else with every tensor that
    holds NaN or infinity; or else if a stored head differs from the token embedding.
    """
    with torch.device("meta"):
        gpt = GPT(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in gpt.state_dict().items()}
    heads = [tensors.pop(name) for name in HEADS if name in tensors]
    faults = [*faults, *_misfits(shapes, tensors)]
    faults += [fault for head in heads for fault in faults_of(head, shapes["wte.weight"])]
    if faults:
        raise ModelError(f"the tensors do not fit the configuration: {'; '.join(faults)}")
    state = _read(shapes, tensors)
    for head in heads:
        if not torch.equal(head.read(), state["wte.weight"]):
            raise ModelError(
                f"{head.key} differs from the token embedding; only a tied head (one tensor for both) is supported"
            )
    gpt.load_state_dict(state, assign=True)
    return gpt.eval()


def _misfits(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor]) -> list[str]:
    faults = [f"missing {name} {shape}" for name, shape in shapes.items() if name not in tensors]
    faults += [f"unexpected {stored.key}" for name, stored in tensors.items() if name not in shapes]
    for name, stored in tensors.items():
        if name in shapes:
            faults += faults_of(stored, shapes[name])
    return faults


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
