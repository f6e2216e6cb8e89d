"""Weights between a Hugging Face GPT-2 folder (config.json, model.safetensors) and a `GPT`. Knows no tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.gpt import GPT

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_DTYPES = ("F32", "F16", "BF16")
# Causal masks that old `transformers` stored as buffers of each layer; the mask is not a weight.
_MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def load_config(folder: Path) -> GPTConfig:
    """Read `folder`/config.json. Raises ModelError when it is missing, no JSON object or describes another network."""
    path = Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"no {CONFIG_FILE} in {folder}; expected a Hugging Face GPT-2 folder") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}; expected an object")
    return GPTConfig.from_dict(values)


def load_gpt(folder: Path) -> GPT:
    """Load the network of a Hugging Face folder in float32, in evaluation mode.

    Raises ModelError naming every missing, unexpected and misshapen tensor at once.
    """
    config = load_config(folder)
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        others = sorted(item.name for item in Path(folder).iterdir() if item.suffix in (".safetensors", ".bin", ".pt"))
        found = f" (found {', '.join(others)})" if others else ""
        raise ModelError(
            f"no {WEIGHTS_FILE} in {folder}{found}; expected all weights in that one file: "
            "save_pretrained(folder, max_shard_size='100GB') of `transformers` writes it"
        )
    with torch.device("meta"):
        gpt = GPT(config)
    try:
        with safe_open(path, framework="pt") as file:
            state = _read_state(file, {name: tuple(tensor.shape) for name, tensor in gpt.state_dict().items()})
    except SafetensorError as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
    except ModelError as error:
        raise ModelError(f"{path} does not fit its {CONFIG_FILE}: {error}") from None
    gpt.load_state_dict(state, assign=True)
    return gpt.eval()


def _read_state(file: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read the tensors named in `shapes` from an open safetensors file as float32, or raise with every fault."""
    stored_keys = file.keys()
    keys = {key.removeprefix(_PREFIX): key for key in stored_keys}
    twice = [key for key in stored_keys if keys[key.removeprefix(_PREFIX)] != key]
    keys = {name: key for name, key in keys.items() if not _MASK_BUFFERS.fullmatch(name)}
    head = keys.pop(_HEAD, None)
    faults = [f"missing {name} {shape}" for name, shape in shapes.items() if name not in keys]
    faults += [f"unexpected {key}" for name, key in keys.items() if name not in shapes]
    faults += [f"{key} is there with and without {_PREFIX!r}" for key in twice]
    for name, key in keys.items():
        stored = file.get_slice(key)
        if name in shapes and tuple(stored.get_shape()) != shapes[name]:
            faults.append(f"{key} has shape {tuple(stored.get_shape())}, expected {shapes[name]}")
        if name in shapes and stored.get_dtype() not in _DTYPES:
            faults.append(f"{key} has dtype {stored.get_dtype()}, expected one of {', '.join(_DTYPES)}")
    if faults:
        raise ModelError("; ".join(faults))
    state = {name: file.get_tensor(key).to(torch.float32) for name, key in keys.items()}
    if head is not None and not torch.equal(file.get_tensor(head).to(torch.float32), state["wte.weight"]):
        raise ModelError(
            f"{head} differs from the token embedding; only a tied head (one tensor for both) is supported"
        )
    return state


def save_gpt(gpt: GPT, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors (weights in `dtype`) into an existing folder."""
    config = gpt.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {_PREFIX + name: tensor.detach().to(dtype).contiguous() for name, tensor in gpt.state_dict().items()}
    (folder / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))  # a full disk is an OSError this way
