"""Read tensors by key from safetensors and PyTorch files, whole or in shards; each tensor is read on request.

PyTorch files go through `torch.load(weights_only=True)`. A file that it refuses is refused here, so that no code in a
file ever runs. Knows no network.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ortgpt_models.errors import ModelError
from ortgpt_models.files import file_is_there, read_json_object
from ortgpt_models.quiet import quiet_warnings

FLOATS = ("F32", "F16", "BF16")
SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"

_FLOAT_OF = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ZIP_MAGIC = b"PK\x03\x04"
_LFS_MAGIC = b"version https://git-lfs"
_UNPICKLER_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_NO_CODE = "code in a pickle is never run; if you trust the file, convert it to safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, before it is read."""

    key: str
    """Its name in the file."""
    shape: tuple[int, ...]
    """Its shape in the file."""
    dtype: str
    """Its type in the file: one of FLOATS, or another name, which the network cannot use."""
    load: Callable[[], Tensor]
    """Reads it from the file, in the type and shape of the file."""
    transposed: bool = False
    """Whether the network has the transpose of it."""

    def read(self) -> Tensor:
        """Return it in float32, as the network has it; a view of the mapped file if nothing has to change."""
        tensor = self.load().detach().to(torch.float32)
        return (tensor.T if self.transposed else tensor).contiguous()


def faults_of(stored: StoredTensor, shape: tuple[int, ...]) -> list[str]:
    """Return why `stored` cannot be the network's tensor of this shape; an empty list if it can."""
    expected = shape[::-1] if stored.transposed else shape
    faults = []
    if stored.shape != expected:
        faults.append(f"{stored.key} has shape {stored.shape}, expected {expected}")
    if stored.dtype not in FLOATS:
        faults.append(f"{stored.key} has dtype {stored.dtype}, expected one of {', '.join(FLOATS)}")
    return faults


def is_finite(tensor: Tensor) -> bool:
    """Tell whether no element is NaN or infinite. A finite sum proves it in one pass over the tensor."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def open_tensor_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, or of the state dict in a PyTorch file, by key.

    Raises ModelError if the file is damaged, holds anything but tensors, or would have to run code.
    """
    return _open_safetensors(path) if path.suffix == SAFETENSORS_SUFFIX else state_tensors(path, load_torch_file(path))


def shard_files(index: Path) -> list[Path]:
    """Return the files that a Hugging Face index (`*.index.json`) names, sorted.

    Raises ModelError if the index is damaged, or names files that are missing or in another folder.
    """
    paths = [index.parent / name for name in sorted(set(read_weight_map(index).values()))]
    missing = [path.name for path in paths if not file_is_there(path)]
    if missing:
        raise ModelError(f"{index} names files that do not exist: {', '.join(missing)}; copy them into the folder")
    return paths


def open_shards(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files that a Hugging Face index names, by key.

    Raises ModelError as shard_files() does; and naming every damaged file, every key that is missing from the file that
    the index names for it, and every key that is in two files.
    """
    tensors: dict[str, StoredTensor] = {}
    file_of: dict[str, str] = {}
    faults, damaged = [], set()
    for path in shard_files(index):
        try:
            opened = open_tensor_file(path)
        except ModelError as error:
            faults.append(str(error))
            damaged.add(path.name)
            continue
        faults += [f"{key} is both in {file_of[key]} and in {path.name}" for key in opened if key in file_of]
        file_of |= dict.fromkeys(opened, path.name)
        tensors |= opened
    for key, name in read_weight_map(index).items():
        if name not in damaged and file_of.get(key) != name:
            place = f"is in {file_of[key]}" if key in file_of else "is in none of the files"
            faults.append(f"{key}, which should be in {name}, {place}")
    if faults:
        raise ModelError(f"{index} does not fit its files: {'; '.join(faults)}")
    return tensors


def load_torch_file(path: Path, *, numpy_scalars: bool = False) -> Any:
    """Return the content of a PyTorch file, with its tensors on the CPU, and mapped if the format allows it.

    `numpy_scalars` accepts plain NumPy numbers, too. Raises ModelError for a damaged file, and for one that
    `weights_only=True` refuses.
    """
    mapped = _first_bytes(path).startswith(_ZIP_MAGIC)  # the format before PyTorch 1.6 cannot be mapped
    try:
        # It warns of formats that it refuses anyway, and of its own old storage classes.
        with quiet_warnings(), torch.serialization.safe_globals(_numpy_scalars() if numpy_scalars else []):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file makes torch raise many kinds
        raise ModelError(f"{path} {_refusal(error)}") from error


def state_tensors(path: Path, state: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a state dict from the file `path`, by key. Raises ModelError if `state` is not one."""
    if not isinstance(state, Mapping):
        raise ModelError(f"{path} holds a {type(state).__name__}; expected a state dict: tensors by name")
    odd = [
        f"{key!r} is a {type(value).__name__}"
        for key, value in state.items()
        if not (isinstance(key, str) and isinstance(value, Tensor))
    ]
    if odd:
        raise ModelError(f"{path} is not a state dict, which holds tensors by name only: {'; '.join(odd)}")
    short = [key for key, tensor in state.items() if _is_short(tensor)]
    if short:
        raise ModelError(f"{path} stores fewer numbers than {', '.join(short[:5])} has; save the tensors whole")
    return {
        key: StoredTensor(key, tuple(tensor.shape), _dtype_name(tensor), tensor.detach) for key, tensor in state.items()
    }


def _open_safetensors(path: Path) -> dict[str, StoredTensor]:
    _first_bytes(path)
    try:
        file: Any = safe_open(path, framework="pt")
        tensors = {}
        for key in file.keys():  # noqa: SIM118  # it is not a mapping
            stored = file.get_slice(key)
            dtype = stored.get_dtype()
            # A tensor that is widened gets a mapping of its own, which is freed with the tensor.
            load = partial(file.get_tensor, key) if dtype == "F32" else partial(_load_alone, path, key)
            tensors[key] = StoredTensor(key, tuple(stored.get_shape()), dtype, load)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from None
    return tensors


def _load_alone(path: Path, key: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


def _is_short(tensor: Tensor) -> bool:
    """Tell whether a tensor has more elements than its storage: a few bytes could claim to be terabytes."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def _dtype_name(tensor: Tensor) -> str:
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"{tensor.layout} on {tensor.device}"
    return _FLOAT_OF.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each key in a Hugging Face index.

    Raises ModelError if the index is damaged, or names a file outside its own folder.
    """
    weight_map = read_json_object(index, "an index of weight files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: weight_map is {weight_map!r:.80}; expected an object that gives each tensor its file"
        )
    odd = sorted({f"{name!r:.80}" for name in weight_map.values() if not _is_plain_name(name)})
    if odd:
        raise ModelError(f"{index} names {', '.join(odd)}; expected names of files in its own folder")
    return weight_map


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\:")


def _numpy_scalars() -> list[Any]:
    """Return the functions and types in the pickle of a NumPy number, by their names before and after NumPy 2."""
    rebuild: Any = np.float64(0).__reduce__()[0]
    types = [type(np.dtype(kind)) for kind in (np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64)]
    return [np.dtype, *types, *((rebuild, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core"))]


def _first_bytes(path: Path) -> bytes:
    """Return the first bytes of the file. Raises ModelError if it cannot be read, or is only a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            first = file.read(len(_LFS_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if first == _LFS_MAGIC:
        raise ModelError(f"{path} is only a Git LFS pointer; fetch the file itself: git lfs pull")
    return first


def _refusal(error: Exception) -> str:
    """Return why torch.load refused a file, without its advice to be less strict."""
    text = str(error)
    if refused := _REFUSED_GLOBAL.search(text):
        return f"asks for {refused[1]} beside its tensors; {_NO_CODE}"
    if isinstance(error, pickle.UnpicklingError):
        reason = _UNPICKLER_REASON.search(text)
        return f"is not a PyTorch file of tensors alone ({reason[1] if reason else 'refused'}); {_NO_CODE}"
    first = text.partition(". ")[0] or type(error).__name__
    return f"is not a readable PyTorch file of tensors ({first}); expected a whole one, as torch.save writes it"
