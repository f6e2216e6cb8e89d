"""Merge an adapter of `peft` (LoRA and its relatives) into a network. Knows no hub and no tokenizer.

`peft` computes the merged weights. This module reads the files itself, so that no code in a pickle runs. It refuses
what `peft` accepts silently: missing and unexpected tensors, settings of a later version, and merged weights that give
other logits than the adapter. Needs the extra `lora`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ortgpt.errors import listed, shown
from ortgpt_exporter.errors import ExportError
from ortgpt_models.config import PRE
from ortgpt_models.files import file_is_there, read_json_object
from ortgpt_models.gpt import GPT
from ortgpt_models.quiet import quiet_warnings
from ortgpt_models.tensor_files import FLOATS, StoredTensor, is_finite, open_tensor_file
from ortgpt_models.tensor_names import EMBEDDING, HEAD, MASK_BUFFERS, key_of, network_name

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# The adapter types that `peft` merges into these networks. Others have no merged weights, work on other layers than
# Conv1D, Embedding and LayerNorm, or load models that their settings name.
ADAPTER_TYPES = (
    "LORA", "ADALORA", "IA3", "LN_TUNING", "TRAINABLE_TOKENS", "VERA", "PVERA", "FOURIERFT", "WAVEFT", "VBLORA",
    "UNILORA", "TINYLORA", "RANDLORA", "HIRA", "GRALORA", "DEFT",
)  # fmt: skip
# Initialisations that leave the weight unchanged, and PiSSA, which changes it in the same way each time. Others (LoftQ,
# OLoRA, CorDA, LoRA-GA, a randomised PiSSA) change it, and the adapter's files do not tell how.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "pissa")

_EXPECTED = "the folder of a PEFT adapter"
_ROOT = "transformer."
_HEAD_FACTORS = "base_model.model.lm_head.lora_"
# Keys of an adapter that was trained on the network without its head.
_HEADLESS = re.compile(r"base_model\.model\.(h|wte|wpe|ln_f|tokens_embed|positions_embed)\.")
# Heads of classifiers among an adapter's keys, by the name of their module, and what `peft` calls their task.
_CLASSIFIER_HEAD = re.compile(r"base_model\.model\.(score|classifier)\.(.*\.)?weight")
_CLASSIFIER_TASKS = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
_MASKS = re.compile(rf"base_model\.model\.({re.escape(_ROOT)})?{MASK_BUFFERS.pattern}")
_TOLERANCE = 1e-4


def adapter_file(folder: Path) -> Path:
    """Return the file that merge_adapter() reads the tensors from. Raises ExportError if there is none."""
    for name in ADAPTER_FILES:
        if file_is_there(folder / name):
            return folder / name
    raise ExportError(f"no {' or '.join(ADAPTER_FILES)} in {folder}; expected {_EXPECTED}")


def merge_adapter(gpt: GPT, folder: Path) -> None:
    """Merge the adapter in `folder`, which save_pretrained() of `peft` wrote, into `gpt` in place.

    Changed weights are new float32 tensors; the old tensors keep their values, in memory and in a mapped file. The head
    becomes a matrix of its own if the adapter makes it differ from the token embedding. Raises ExportError, or
    ModelError for a damaged file, with `gpt` unchanged, if the adapter cannot be merged: its type or a setting is not
    supported, or tensors are missing, unexpected, misshapen or not finite. Raises ModuleNotFoundError naming `peft`
    without that package.
    """
    config = _read_config(folder)
    path = adapter_file(folder)
    stored = {key: tensor for key, tensor in open_tensor_file(path).items() if not _MASKS.fullmatch(key)}
    _refuse_classifier(path, config, stored, "GPT2" if gpt.config.norm == PRE else "OpenAIGPT")
    try:
        with torch.random.fork_rng(devices=[]):  # new networks and adapters draw from the caller's random numbers
            state = _merged_state(gpt, config, stored)
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from None
    if HEAD in state and gpt.config.tie_word_embeddings:
        gpt.untie_head()
    gpt.load_state_dict(state, assign=True)


def _read_config(folder: Path) -> Any:
    """Return the settings of an adapter as `peft` reads them. Raises ExportError for what it would not honour."""
    import peft

    path = folder / ADAPTER_CONFIG_FILE
    values = read_json_object(path, _EXPECTED)
    kind = values.get("peft_type")
    if kind not in ADAPTER_TYPES:
        raise ExportError(f"{path}: peft_type = {shown(kind)} (accepted: {', '.join(ADAPTER_TYPES)})")
    known = peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind].__dataclass_fields__
    faults = [f"{key} = {shown(value)} (written by a newer peft)" for key, value in values.items()
              if value and key not in known]  # fmt: skip
    name = values.get("init_lora_weights", True)
    if (name.lower() if isinstance(name, str) else name) not in _INITIALISATIONS:
        faults.append(f"init_lora_weights = {shown(name)} (this initialisation changes the base weights)")
    if values.get("megatron_config"):  # peft would import the module that megatron_core names
        faults.append(f"megatron_config = {shown(values['megatron_config'])} (accepted: null)")
    if faults:
        raise ExportError(f"{path}: {listed(faults)}")
    with _one_line_errors(path):
        return peft.PeftConfig.from_pretrained(str(folder))


def _refuse_classifier(path: Path, config: Any, stored: Mapping[str, StoredTensor], family: str) -> None:
    """Raise ExportError, which says how to merge it, for an adapter of a classifier: the network has no such head."""
    named = {key: found[1] for key in stored if (found := _CLASSIFIER_HEAD.fullmatch(key))}
    heads = [(name, stored[key].shape) for key, name in named.items() if len(stored[key].shape) == 2]
    task = getattr(config.task_type, "value", config.task_type)
    if not heads and task not in _CLASSIFIER_TASKS:
        return
    name, shape = heads[0] if heads else ("", ())
    suffix = _CLASSIFIER_TASKS.get(task) or _CLASSIFIER_TASKS["SEQ_CLS" if name == "score" else "TOKEN_CLS"]
    why = f"has the head {name} {tuple(shape)}" if heads else f"has the task_type {task}"
    count = shape[0] if heads else "N"
    call = f"PeftModel.from_pretrained({family}{suffix}.from_pretrained(BASE, num_labels={count}), ADAPTER)"
    raise ExportError(
        f"{path} {why}: it is the adapter of a classifier, and the base is a language model. Merge it into the base "
        f"with peft, and export OUT: `{call}.merge_and_unload().save_pretrained(OUT)`"
    )


@torch.no_grad()
def _merged_state(gpt: GPT, config: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the state of `gpt` with the adapter merged; tensors that it does not change are those of `gpt`."""
    import peft

    network = as_transformers(gpt)
    ties_weights = getattr(config, "ensure_weight_tying", False) and isinstance(config.target_modules, set)
    if ties_weights and any(key.startswith(_HEAD_FACTORS) for key in stored):
        config.target_modules = {*config.target_modules, "lm_head"}  # peft leaves it out when it saves
    base = network.transformer if any(map(_HEADLESS.match, stored)) else network
    with _one_line_errors("the adapter does not fit the network"):
        adapted = peft.PeftModel(base, config).eval()
    tensors = _read(adapted, stored)
    ids = torch.arange(min(16, gpt.config.n_positions))[None] * 7 % gpt.config.vocab_size
    with _one_line_errors("peft cannot merge this adapter"):
        peft.set_peft_model_state_dict(adapted, tensors, low_cpu_mem_usage=True)
        for module in adapted.modules():
            if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                for parameter in module.get_base_layer().parameters():
                    parameter.data = parameter.data.clone()  # some types merge in place, which must not reach `gpt`
        before = network(ids, use_cache=False).logits  # (1, seq, vocab_size)
        adapted.merge_and_unload(safe_merge=True)
        after = network(ids, use_cache=False).logits
    state = network.state_dict()
    is_tied = gpt.config.tie_word_embeddings
    embedding = key_of(EMBEDDING, gpt.config.norm)
    if is_tied and torch.allclose(state[HEAD], state[embedding], rtol=1e-5, atol=1e-6):  # each has its own rounding
        del state[HEAD]
    if not (after - before).abs().max() <= _TOLERANCE * max(1.0, float(before.abs().max())):
        raise ExportError("the logits of the merged network differ from those of the adapter; peft cannot merge it")
    return {network_name(name.removeprefix(_ROOT)): tensor.contiguous() for name, tensor in state.items()}


def as_transformers(gpt: GPT) -> Any:
    """Return `gpt` as the network of `transformers`, over the same tensors, in evaluation mode.

    The head is a parameter of its own there, so that a change of the token embedding alone shows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # GPT-1 has buffers that no checkpoint holds, so the network is made with values.
    with torch.device("meta" if gpt.config.norm == PRE else "cpu"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**gpt.config.to_dict()))
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach())
    state = {key_of(name, gpt.config.norm): tensor for name, tensor in gpt.state_dict().items()}
    network.load_state_dict(state | {HEAD: gpt.head.weight.detach()}, assign=True)
    return network.eval()


def _read(adapted: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the adapter's tensors in float32. Raises ExportError naming each that does not fit `adapted`."""
    from peft import get_peft_model_state_dict

    required = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    optional = get_peft_model_state_dict(adapted, save_embedding_layers=True)
    faults = [f"missing {key} {tuple(required[key].shape)}" for key in required if key not in stored]
    faults += [f"unexpected {key}" for key in stored if key not in optional]
    for key, tensor in stored.items():
        if key in optional and tensor.shape != tuple(optional[key].shape):
            faults.append(f"{key} has shape {tensor.shape}, expected {tuple(optional[key].shape)}")
        if tensor.dtype not in FLOATS:
            faults.append(f"{key} has dtype {tensor.dtype}, expected one of {', '.join(FLOATS)}")
    if faults:
        raise ExportError(f"the adapter does not fit the network: {listed(faults)}")
    tensors = {key: tensor.read() for key, tensor in stored.items()}
    faults = [f"{key} holds NaN or infinity" for key, tensor in tensors.items() if not is_finite(tensor)]
    if faults:
        raise ExportError(f"{listed(faults)}; expected finite numbers: take the adapter from before they were lost")
    return tensors


@contextlib.contextmanager
def _one_line_errors(place: object) -> Iterator[None]:
    """Turn the errors of `peft` into ExportError, one line each, and keep its warnings from stderr."""
    try:
        with quiet_warnings():
            yield
    except Exception as error:  # peft raises many kinds for settings and tensors that it cannot use
        raise ExportError(f"{place}: {' '.join(str(error).split())[:300] or type(error).__name__}") from error
