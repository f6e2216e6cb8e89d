"""Load a `GPT` from a Hugging Face folder (config.json and weight files), and save it. Knows no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ortgpt_models.classifier import ClassifierConfig, GPTClassifier, body_config, label_notes
from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.files import file_is_there, read_json_object
from ortgpt_models.gpt import GPT
from ortgpt_models.state_dict import assemble_with_head, parameter_names
from ortgpt_models.tensor_files import INDEX_SUFFIX, open_shards, open_tensor_file, shard_files
from ortgpt_models.tensor_names import HEAD, key_of, name_tensors

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# Files that may hold the weights, or list the files that do; the first one that exists is read.
WEIGHTS_SOURCES = (
    WEIGHTS_FILE,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# The language model, alone, without its tied head, and with a second head, which another note names.
_LANGUAGE_MODELS = tuple(
    family + model for family in ("GPT2", "OpenAIGPT") for model in ("LMHeadModel", "Model", "DoubleHeadsModel")
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".ckpt", ".gguf", ".index")
# How weights of other programs become the expected files, by a pattern of their names.
_CONVERSIONS = {
    "*.ckpt.index": "TensorFlow's, as OpenAI published GPT-2 (on the hub: openai-community/gpt2, gpt2-medium, "
    "gpt2-large and gpt2-xl): transformers 4.46 with TensorFlow converts them by `python -m "
    "transformers.models.gpt2.convert_gpt2_original_tf_checkpoint_to_pytorch --gpt2_checkpoint_path FOLDER "
    "--gpt2_config_file CONFIG --pytorch_dump_folder_path OUT`, where CONFIG is a config.json of that size",
    "tf_model*.h5": "TensorFlow's: transformers 4 with TensorFlow converts them by "
    "`AutoModelForCausalLM.from_pretrained(FOLDER, from_tf=True).save_pretrained(OUT)`",
    "flax_model*.msgpack": "Flax's: transformers 4 with Flax converts them by "
    "`AutoModelForCausalLM.from_pretrained(FOLDER, from_flax=True).save_pretrained(OUT)`",
    "*.gguf": "llama.cpp's: `AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(OUT)` of "
    "transformers converts them",
}


def weight_files(folder: Path) -> list[Path]:
    """Return the files that load_gpt reads the tensors of a Hugging Face folder from, in order.

    Raises ModelError if there are none, or if an index names files that are missing or outside the folder.
    """
    source = _find_source(Path(folder))
    return shard_files(source) if source.name.endswith(INDEX_SUFFIX) else [source]


def load_network(folder: Path, *, on_note: Callable[[str], None] = lambda note: None) -> GPT | GPTClassifier:
    """Load the classifier of a Hugging Face folder whose config.json names one, else do as load_gpt().

    Raises ModelError as load_gpt() does, also for labels that do not fit and for a head that does not fit the labels.
    """
    return _load(Path(folder), on_note, takes_classifiers=True)


def load_gpt(folder: Path, *, on_note: Callable[[str], None] = lambda note: None) -> GPT:
    """Load the network of a Hugging Face folder in float32, in evaluation mode.

    The weights come from the first of WEIGHTS_SOURCES that exists, in float32, float16 or bfloat16; those in float32
    stay in the mapped file. `on_note` gets a line for a prefix and for tensors that were left out (see name_tensors),
    and if the head is not what config.json says. Raises ModelError naming every missing, unexpected and misshapen
    tensor; or every one that holds NaN or infinity.
    """
    gpt = _load(Path(folder), on_note, takes_classifiers=False)
    assert isinstance(gpt, GPT)
    return gpt


def _load(folder: Path, on_note: Callable[[str], None], *, takes_classifiers: bool) -> GPT | GPTClassifier:
    if folder.is_dir() and not file_is_there(folder / CONFIG_FILE):
        _refuse_other_weights(folder)
    values = read_json_object(folder / CONFIG_FILE, "a Hugging Face folder of GPT-2 or GPT-1")
    config = GPTConfig.from_dict(values)
    classifier = ClassifierConfig.from_dict(values) if takes_classifiers else None
    config = config if classifier is None else body_config(config)
    head_shapes = {} if classifier is None else classifier.head_shapes(config.n_embd)
    source = _find_source(folder)
    stored = open_shards(source) if source.name.endswith(INDEX_SUFFIX) else open_tensor_file(source)
    try:
        named = name_tensors(stored, parameter_names(config), heads=head_shapes)
        del stored  # so that each float16 tensor is freed once it is widened
        gpt, head = assemble_with_head(config, named, head_shapes)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    for note in (*named.notes, *(label_notes(values, classifier) if classifier else _config_notes(values, gpt))):
        on_note(f"{source.name}: {note}")
    return gpt if classifier is None else GPTClassifier(gpt, classifier, head).eval()


def _config_notes(values: Mapping[str, Any], gpt: GPT) -> list[str]:
    """Return where the network is not what the values of config.json say."""
    notes = []
    if values.get("tie_word_embeddings", True) and not gpt.config.tie_word_embeddings:
        notes.append(
            f"{HEAD} differs from the token embedding, though {CONFIG_FILE} ties the two; it was taken for the head, "
            "as `transformers` 5 does (earlier versions take the token embedding)"
        )
    architectures = values.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if names and not set(names) & set(_LANGUAGE_MODELS):
        notes.append(
            f"{CONFIG_FILE} names the architecture {', '.join(names)}; only its language model was taken, whose head "
            f"is {'the token embedding' if gpt.config.tie_word_embeddings else HEAD}"
        )
    return notes


def save_gpt(gpt: GPT, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors (weights in `dtype`) into an existing folder. Raises OSError."""
    _save(gpt, folder, dtype, {}, {})


def save_classifier(classifier: GPTClassifier, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Do as save_gpt() for a network with a classifier's head. Raises OSError."""
    named = {"weight": classifier.weight, "bias": classifier.bias}
    head = {f"{classifier.config.head_name}.{name}": each for name, each in named.items() if each is not None}
    _save(classifier.gpt, folder, dtype, classifier.config.to_dict(), head)


def _save(gpt: GPT, folder: Path, dtype: torch.dtype, values: Mapping[str, Any], head: Mapping[str, Tensor]) -> None:
    config = gpt.config.to_dict() | dict(values) | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8", newline="\n")
    named = {key_of(name, gpt.config.norm): tensor for name, tensor in gpt.state_dict().items()}
    tensors = {key: tensor.detach().to(dtype).contiguous() for key, tensor in (named | dict(head)).items()}
    (folder / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))  # a full disk is an OSError this way


def _find_source(folder: Path) -> Path:
    """Return the weight file or index to read. Raises ModelError if the folder has none."""
    for name in WEIGHTS_SOURCES:
        if file_is_there(folder / name):
            return folder / name
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a Hugging Face folder of GPT-2 or GPT-1")
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
