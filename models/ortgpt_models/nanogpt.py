"""Load a `GPT` from a nanoGPT checkpoint (`ckpt.pt`, as its train.py writes it). Knows no tokenizer.

nanoGPT differs from GPT-2 as follows (https://github.com/karpathy/nanoGPT, model.py): linear layers store (out, in);
with `bias=False`, neither linear layers nor LayerNorms have a bias; the activation is exact GELU. Its vocabulary is
often padded to 50,304 rows, which are kept. It names no end-of-text token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.gpt import GPT, Conv1D
from ortgpt_models.state_dict import assemble_gpt, parameter_names
from ortgpt_models.tensor_files import StoredTensor, load_torch_file, state_tensors
from ortgpt_models.tensor_names import name_tensors

_COMPILED = "_orig_mod."  # what torch.compile leaves, and nanoGPT itself removes
# Our name of each size by nanoGPT's.
_SIZES = {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size")} | {"block_size": "n_positions"}


def load_nanogpt(
    path: Path, *, activation_function: str = "gelu", on_note: Callable[[str], None] = lambda note: None
) -> GPT:
    """Load the network of a nanoGPT `ckpt.pt` in float32, in evaluation mode, without bos and eos ids.

    A checkpoint does not state its activation, one of config.ACTIVATIONS: exact GELU ("gelu"), or, if it was trained
    before mid-2023, the tanh approximation ("gelu_new"); forks have others. `on_note` gets a line for what was left out
    of the file: the prefix of a wrapper, tensors beside the network. Raises ModelError if the file would have to run
    code or is of another kind, or naming every size and tensor that does not fit.
    """
    path = Path(path)
    model, args = _parts(path, load_torch_file(path, numpy_scalars=True))
    stored = state_tensors(path, model)
    try:
        config = _config(args, activation_function)
        has_bias = args.get("bias", True)
        required = [name for name in parameter_names(config) if has_bias or not name.endswith(".bias")]
        named = name_tensors(stored, required, usual_wrapper=_COMPILED)
        with torch.device("meta"):
            gpt = GPT(config)
        _transpose_linear(gpt, named.tensors)
        if not has_bias:
            named.faults.extend(_add_zero_biases(gpt, named.tensors))
        gpt = assemble_gpt(config, named)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    for note in named.notes:
        on_note(f"{path.name}: {note}")
    return gpt


def _parts(path: Path, checkpoint: Any) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return `model` and `model_args` of a checkpoint. Raises ModelError if either is missing."""
    entries = checkpoint if isinstance(checkpoint, Mapping) else {}
    model, args = entries.get("model"), entries.get("model_args")
    if not isinstance(model, Mapping) or not isinstance(args, Mapping):
        keys = ", ".join(map(repr, entries)) or "no keys"
        kind = f"a mapping with {keys}" if isinstance(checkpoint, Mapping) else f"a {type(checkpoint).__name__}"
        raise ModelError(
            f"{path} holds {kind}; expected a nanoGPT checkpoint: 'model' (the state dict) and 'model_args' (its sizes)"
        )
    return model, {key: value.item() if isinstance(value, np.generic) else value for key, value in args.items()}


def _config(args: Mapping[str, Any], activation_function: str) -> GPTConfig:
    missing = [f"model_args has no {name}" for name in _SIZES if name not in args]
    if not isinstance(args.get("bias", True), bool):
        missing.append(f"model_args has bias = {args['bias']!r} (accepted: True, False)")
    if missing:
        raise ModelError("; ".join(missing))
    dropout = args.get("dropout", 0.0)
    try:
        return GPTConfig(
            **{ours: args[theirs] for theirs, ours in _SIZES.items()},
            activation_function=activation_function,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
        )
    except ModelError as error:
        raise ModelError(f"model_args (whose block_size is n_positions, and dropout each *_pdrop): {error}") from None


def _transpose_linear(gpt: GPT, tensors: dict[str, StoredTensor]) -> None:
    for name, module in gpt.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, Conv1D) and weight in tensors:
            tensors[weight] = replace(tensors[weight], transposed=True)


def _add_zero_biases(gpt: GPT, tensors: dict[str, StoredTensor]) -> list[str]:
    """Add zero biases for a network without any; return a fault for each bias that is stored all the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in gpt.named_parameters() if name.endswith(".bias")}
    faults = [f"unexpected {tensors[name].key} (model_args has bias = False)" for name in shapes if name in tensors]
    for name, shape in shapes.items():
        tensors.setdefault(name, StoredTensor(name, shape, "F32", partial(torch.zeros, shape)))
    return faults
