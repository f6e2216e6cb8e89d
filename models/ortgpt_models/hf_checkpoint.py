"""Load a `GPT` from a Hugging Face GPT-2 folder (config.json and weight files), and save it. Knows no tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.files import file_is_there, read_json_object
from ortgpt_models.gpt import GPT
from ortgpt_models.state_dict import HEADS, assemble_gpt, name_tensors
from ortgpt_models.tensor_files import INDEX_SUFFIX, open_shards, open_tensor_file, shard_files

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Files that may hold the weights, or list the files that do; the first one that exists is read.
WEIGHTS_SOURCES = (
    WEIGHTS_FILE,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_PREFIX = "transformer."
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt", ".gguf", ".index")
# How weights of other programs become the expected files, by a pattern of their names.
_CONVERSIONS = {
    "*.ckpt.index": "TensorFlow's, as OpenAI published GPT-2 (on the hub: openai-community/gpt2, gpt2-medium, "
    "gpt2-large and gpt2-xl): transformers 4.46 with TensorFlow converts them by `python -m "
    "transformers.models.gpt2.convert_gpt2_original_tf_checkpoint_to_pytorch --gpt2_checkpoint_path FOLDER "
    "--gpt2_config_file CONFIG --pytorch_dump_folder_path OUT`, where CONFIG is a config.json of that size",
    "tf_model*.h5": "TensorFlow's: transformers 4 with TensorFlow converts them by "
    "`GPT2LMHeadModel.from_pretrained(FOLDER, from_tf=True).save_pretrained(OUT)`",
    "flax_model*.msgpack": "Flax's: transformers 4 with Flax converts them by "
    "`GPT2LMHeadModel.from_pretrained(FOLDER, from_flax=True).save_pretrained(OUT)`",
    "*.gguf": "llama.cpp's: `AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(OUT)` of "
    "transformers converts them",
}


def weight_files(folder: Path) -> list[Path]:
    """Return the files that load_gpt reads the tensors of a Hugging Face folder from, in order.

    Raises ModelError if there are none, or if an index names files that are missing or outside the folder.
    """
    source = _find_source(Path(folder))
    return shard_files(source) if source.name.endswith(INDEX_SUFFIX) else [source]


def load_gpt(folder: Path) -> GPT:
    """Load the network of a Hugging Face folder in float32, in evaluation mode.

    The weights come from the first of WEIGHTS_SOURCES that exists, in float32, float16 or bfloat16; those in float32
    stay in the mapped file. Raises ModelError naming every missing, unexpected and misshapen tensor; or every one that
    holds NaN or infinity; or a stored head that differs from the token embedding.
    """
    folder = Path(folder)
    if folder.is_dir() and not file_is_there(folder / CONFIG_FILE):
        _refuse_other_weights(folder)
    values = read_json_object(folder / CONFIG_FILE, "a Hugging Face GPT-2 folder")
    config = GPTConfig.from_dict(values)
    source = _find_source(folder)
    stored = open_shards(source) if source.name.endswith(INDEX_SUFFIX) else open_tensor_file(source)
    tensors, faults = name_tensors(stored, re.compile(re.escape(_PREFIX)))
    del stored  # so that each float16 tensor is freed once it is widened
    if values.get("tie_word_embeddings") is False and not any(name in tensors for name in HEADS):
        faults.append(
            f"missing {HEADS[0]}, which {CONFIG_FILE} says is there (tie_word_embeddings = false); "
            "set it to true if the head is the token embedding"
        )
    try:
        return assemble_gpt(config, tensors, faults)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None


def save_gpt(gpt: GPT, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors (weights in `dtype`) into an existing folder. Raises OSError."""
    config = gpt.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    tensors = {_PREFIX + name: tensor.detach().to(dtype).contiguous() for name, tensor in gpt.state_dict().items()}
    (folder / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))  # a full disk is an OSError this way


def _find_source(folder: Path) -> Path:
    """Return the weight file or index to read. Raises ModelError if the folder has none."""
    for name in WEIGHTS_SOURCES:
        if file_is_there(folder / name):
            return folder / name
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a Hugging Face GPT-2 folder")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    raise ModelError(
        f"no {', '.join(WEIGHTS_SOURCES[:-1])} or {WEIGHTS_SOURCES[-1]} in {folder} "
        f"(weights found: {', '.join(others) or 'none'}); {how_to_convert(others)}"
    )


def how_to_convert(names: Iterable[str]) -> str:
    """Return how the weights in files of these names become those that load_gpt reads."""
    for name in names:
        for pattern, how in _CONVERSIONS.items():
            if fnmatchcase(name, pattern):
                return f"{name} is {how}"
    return "save_pretrained of `transformers` writes the expected files"


def _refuse_other_weights(folder: Path) -> None:
    """Raise ModelError for a folder without a configuration that has OpenAI's own checkpoint."""
    found = sorted(path.name for path in folder.glob("*.ckpt.index"))
    if found:
        raise ModelError(f"no {CONFIG_FILE} in {folder}; {how_to_convert(found)}")
