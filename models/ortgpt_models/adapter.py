"""Merge a PEFT LoRA adapter into a network. Knows the adapter's tensors, not the settings' meaning or any checkpoint.

LoRA (Hu et al. 2021) adds a product of two thin factors to a weight, W + scale · B·A for W of (out, in). Here every
weight but the head's is stored (in, out), so the sum is W + scale · Aᵀ·Bᵀ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ortgpt_models.adapter_config import AdapterConfig, read_adapter_config
from ortgpt_models.errors import ModelError
from ortgpt_models.files import file_is_there
from ortgpt_models.gpt import GPT, Conv1D
from ortgpt_models.state_dict import MASK_BUFFERS
from ortgpt_models.tensor_files import StoredTensor, faults_of, is_finite, open_tensor_file

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")

_PREFIX = "base_model.model."
_ROOT = "transformer."
_EMBEDDING = "wte"
_EMBEDDINGS = (_EMBEDDING, "wpe")
_HEAD = "lm_head"
_EMBEDDING_WEIGHT = f"{_EMBEDDING}.weight"
_HEAD_WEIGHT = f"{_HEAD}.weight"
_LINEAR_FACTORS = ("lora_A.weight", "lora_B.weight")
_EMBEDDING_FACTORS = ("lora_embedding_A", "lora_embedding_B")


def merge_adapter(gpt: GPT, folder: Path) -> None:
    """Merge the LoRA adapter in `folder`, which PEFT's save_pretrained wrote, into `gpt` in place.

    Changed weights are new tensors: what they were is left as it is, in memory and in a mapped file. Raises ModelError,
    with `gpt` as it was, naming every setting that is not plain LoRA; or every tensor that is missing, unexpected or
    misshapen; or when the head would no longer be the token embedding.
    """
    folder = Path(folder)
    config = read_adapter_config(folder)
    path = adapter_file(folder)
    stored = open_tensor_file(path)
    try:
        _merge(gpt, config, stored)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def adapter_file(folder: Path) -> Path:
    """Return the file that merge_adapter reads the tensors from. Raises ModelError when there is none."""
    for name in ADAPTER_FILES:
        if file_is_there(Path(folder) / name):
            return Path(folder) / name
    raise ModelError(f"no {' or '.join(ADAPTER_FILES)} in {folder}; expected the folder of a PEFT LoRA adapter")


@dataclass(frozen=True)
class _Adapter:
    """The tensors of an adapter by our names: whole parameters, and the two factors of each module.

    `root` is what the adapted network put before our names.
    """

    root: str
    whole: dict[str, StoredTensor] = field(default_factory=dict)
    factors: defaultdict[str, dict[str, StoredTensor]] = field(default_factory=lambda: defaultdict(dict))

    def their_name(self, module: str) -> str:
        return module if module == _HEAD else self.root + module

    def our_name(self, key: str) -> str:
        """Return the key as our names have it; nothing for a key that is not of the adapted network."""
        name = key.removeprefix(_PREFIX)
        if name == key or not name.startswith((self.root, f"{_HEAD}.")):
            return ""
        return name.removeprefix(self.root)


@dataclass(frozen=True)
class _Change:
    """What becomes of one parameter: `whole` in its place, if any, then `scale` · left · right added, if any."""

    whole: StoredTensor | None
    product: tuple[StoredTensor, StoredTensor] | None = None  # (rows, rank), (rank, columns)
    scale: float = 1.0

    def apply(self, parameter: Tensor) -> Tensor:
        weight = parameter if self.whole is None else self.whole.read()
        if self.product is None:
            return weight
        left, right = self.product
        return torch.addmm(weight, left.read(), right.read(), alpha=self.scale)


@torch.no_grad()
def _merge(gpt: GPT, config: AdapterConfig, stored: Mapping[str, StoredTensor]) -> None:
    adapter, faults = _sort(gpt, stored)
    faults += _factor_faults(gpt, config, adapter)
    faults += [f"missing {name} ({why})" for name, why in _wanted(gpt, config, adapter) if name not in adapter.whole]
    if faults:
        raise ModelError(f"the adapter does not fit the network: {'; '.join(faults)}")
    faults = [f"{tensor.key} holds NaN or infinity" for tensor in stored.values() if not is_finite(tensor.read())]
    if faults:
        raise ModelError(f"{'; '.join(faults)}; expected finite numbers: take the adapter from before they were lost")
    changes = _changes(config, adapter)
    embedding, head = changes[_EMBEDDING_WEIGHT], changes.pop(_HEAD_WEIGHT)
    if head != embedding and not torch.equal(head.apply(gpt.wte.weight), embedding.apply(gpt.wte.weight)):
        raise ModelError(
            "the adapter parts the head from the token embedding; only a tied head (one tensor for both) is supported: "
            f"train it without {_EMBEDDING} and {_HEAD}, or with both and ensure_weight_tying"
        )
    for name, change in changes.items():
        parameter = gpt.get_parameter(name)
        parameter.data = change.apply(parameter.data)


def _weights(gpt: GPT) -> dict[str, tuple[int, int]]:
    """Return the weights that may have factors, by module, as the (inputs, outputs) that PEFT takes them for."""
    modules = [(name, module) for name, module in gpt.named_modules() if isinstance(module, Conv1D | nn.Embedding)]
    shapes = {name: (module.weight.shape[0], module.weight.shape[1]) for name, module in modules}
    return shapes | {_HEAD: shapes[_EMBEDDING][::-1]}


def _factor_names(module: str) -> tuple[str, str]:
    return _EMBEDDING_FACTORS if module in _EMBEDDINGS else _LINEAR_FACTORS


def _sort(gpt: GPT, stored: Mapping[str, StoredTensor]) -> tuple[_Adapter, list[str]]:
    """Return the tensors by our names, and the faults of those that the network has no place for or another shape."""
    adapter = _Adapter(_ROOT if any(key.startswith(_PREFIX + _ROOT) for key in stored) else "")  # "": of GPT2Model
    weights = _weights(gpt)
    shapes = {name: tuple(tensor.shape) for name, tensor in gpt.named_parameters()}
    shapes[_HEAD_WEIGHT] = shapes[_EMBEDDING_WEIGHT]
    faults = []
    for key, tensor in stored.items():
        name = adapter.our_name(key)
        module, _, factor = name.replace(".lora_", ":lora_").partition(":")
        whole = name.replace(".base_layer.", ".")
        if module in weights and factor in _factor_names(module):
            adapter.factors[module][factor] = tensor
        elif whole in adapter.whole:
            faults.append(f"{whole} is there twice, as {adapter.whole[whole].key} and {key}")
        elif whole in shapes:
            adapter.whole[whole] = tensor
            faults += faults_of(tensor, shapes[whole])
        elif not MASK_BUFFERS.fullmatch(name):
            faults.append(f"unexpected {key}")
    return adapter, faults


def _factor_faults(gpt: GPT, config: AdapterConfig, adapter: _Adapter) -> list[str]:
    """Name the factors that are misshapen, or missing where there is the other one or the settings want both."""
    faults = []
    for module, (n_in, n_out) in _weights(gpt).items():
        path = adapter.their_name(module)
        found = adapter.factors.get(module, {})
        if not found and not config.is_target(path):
            continue
        rank = config.rank(path)
        for factor, shape in zip(_factor_names(module), ((rank, n_in), (n_out, rank)), strict=True):
            if factor in found:
                faults += faults_of(found[factor], shape)
            else:
                faults.append(f"missing {_PREFIX}{path}.{factor} {shape}")
    return faults


def _wanted(gpt: GPT, config: AdapterConfig, adapter: _Adapter) -> Iterator[tuple[str, str]]:
    """Yield the parameters that must be there whole, each with the setting that says so."""
    names = [*dict(gpt.named_parameters()), _HEAD_WEIGHT]
    for name in names:
        module, _, last = name.rpartition(".")
        parts = module.split(".")
        ancestors = (".".join(parts[: end + 1]) for end in range(len(parts)))
        if any(config.is_saved(adapter.their_name(ancestor)) for ancestor in ancestors):
            yield name, "modules_to_save has it"
        elif last == "bias" and (config.bias == "all" or (config.bias == "lora_only" and module in adapter.factors)):
            yield name, f"bias = {config.bias!r}"


def _changes(config: AdapterConfig, adapter: _Adapter) -> dict[str, _Change]:
    """Return what becomes of each parameter, the head and the token embedding always among them."""
    changes = {name: _Change(whole) for name, whole in adapter.whole.items()}
    # PEFT keeps the two one tensor unless it trained a copy of either as a module to save.
    embedding, head = adapter.whole.get(_EMBEDDING_WEIGHT), adapter.whole.get(_HEAD_WEIGHT)
    head_is_apart = config.is_saved(_HEAD)
    embedding_is_apart = config.is_saved(adapter.their_name(_EMBEDDING))
    changes[_EMBEDDING_WEIGHT] = _Change(head if embedding is None and not head_is_apart else embedding)
    changes[_HEAD_WEIGHT] = _Change(embedding if head is None and not embedding_is_apart else head)
    for module, factors in adapter.factors.items():
        first, second = (factors[name] for name in _factor_names(module))
        if module == _HEAD:  # the one weight of (out, in)
            product = second, first
        else:
            product = replace(first, transposed=True), replace(second, transposed=True)
        name = f"{module}.weight"
        whole = changes[name].whole if name in changes else None
        changes[name] = _Change(whole, product, config.scale(adapter.their_name(module)))
    return changes
