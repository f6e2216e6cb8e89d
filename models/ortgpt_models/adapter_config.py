"""The settings of a PEFT LoRA adapter (adapter_config.json): what they mean, and which are not plain LoRA.

A setting that this package does not know is refused unless it is off, since it may change the function that the adapter
computes. Knows no tensor.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ortgpt_models.errors import ModelError
from ortgpt_models.files import read_json_object

_T = TypeVar("_T")

ADAPTER_CONFIG_FILE = "adapter_config.json"

_READ = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights",
    "modules_to_save", "target_modules", "exclude_modules", "layers_to_transform",
})  # fmt: skip
# Settings of the training, of how an adapter began, or of where it came from: they change nothing in what was stored.
_NEUTRAL = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
})  # fmt: skip
# What else PEFT has, and why it is no sum of a weight and a product.
_REASONS = {
    "use_dora": "DoRA rescales what the weight does",
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "BD-LoRA stores blocks of the factors",
    "layer_replication": "layers would be repeated",
    "trainable_token_indices": "single rows of the embedding were trained",
    "target_parameters": "it stores its factors another way",
    "lora_bias": "the factors have a bias",
    "alora_invocation_tokens": "aLoRA acts on some tokens only",
    "velora_config": "VeLoRA is no plain LoRA",
    "monteclora_config": "it samples the factors",
    "arrow_config": "it picks among adapters by the input",
    "kasa_config": "KaSA cuts the weight down first",
}
_BIASES = ("none", "all", "lora_only")
# Beginnings that leave the weight as it was. The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract theirs from it.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Plain LoRA as PEFT means it: rank and alpha, by pattern for some modules, and what is stored whole beside it.

    Modules go by their names in the network that was adapted, such as `transformer.h.0.attn.c_attn` or `lm_head`.
    """

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    bias: str = "none"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] | str = ()

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor on B·A (Hu et al. 2021; with use_rslora Kalajdzievski 2023)."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)

    def is_saved(self, module: str) -> bool:
        """Tell whether the module was trained and stored whole, apart from what may share its weight."""
        return module.endswith(self.modules_to_save)

    def is_target(self, module: str) -> bool:
        """Tell whether the module must have factors; False where the settings leave it open."""
        within_saved = any(f".{name}." in f".{module}." for name in self.modules_to_save)
        if within_saved or self.is_saved(module) or _names(self.exclude_modules, module):
            return False
        return _names(self.target_modules, module)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read `folder`/adapter_config.json.

    Raises ModelError naming every setting that has no sense or makes the adapter something else than plain LoRA.
    """
    path = folder / ADAPTER_CONFIG_FILE
    values = read_json_object(path, "the folder of a PEFT LoRA adapter")
    if values.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type = {values.get('peft_type')!r} (accepted: 'LORA')")
    faults = [*_unsupported(values), *_senseless(values)]
    if faults:
        raise ModelError(
            f"{path}: {'; '.join(faults)}; only plain LoRA is merged here, "
            "merge_and_unload() and save_pretrained() of `peft` write another as a checkpoint"
        )
    names = ("r", "lora_alpha", "use_rslora", "bias", "rank_pattern", "alpha_pattern")
    given = {name: values[name] for name in names if values.get(name) is not None}
    lists = {name: _as_names(values.get(name)) for name in ("modules_to_save", "target_modules", "exclude_modules")}
    if values.get("layers_to_transform") is not None or lists["target_modules"] == "all-linear":
        lists["target_modules"] = ()
    return AdapterConfig(**given, **lists)


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    faults = [
        f"{key} = {reprlib.repr(value)} ({_REASONS.get(key, 'an unknown setting')})"
        for key, value in values.items()
        if value and key not in _READ | _NEUTRAL
    ]
    beginning = values.get("init_lora_weights", True)
    if (beginning.lower() if isinstance(beginning, str) else beginning) not in _BEGINNINGS:
        faults.append(f"init_lora_weights = {beginning!r} (such an adapter belongs to a weight that it changed first)")
    return faults


def _senseless(values: Mapping[str, Any]) -> list[str]:
    """Name the settings whose values are of the wrong kind."""
    checks = {
        "r": (_is_rank, "an integer of 1 or more"),
        "lora_alpha": (_is_alpha, "a number"),
        "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
        "bias": (lambda value: value in _BIASES, ", ".join(_BIASES)),
        "rank_pattern": (lambda value: _is_pattern(value, _is_rank), "integers of 1 or more by pattern of module name"),
        "alpha_pattern": (lambda value: _is_pattern(value, _is_alpha), "numbers by pattern of module name"),
        "modules_to_save": (_is_list, "a list of names"),
        "target_modules": (lambda value: _is_list(value) or _is_regex(value), "a list of names or a pattern"),
        "exclude_modules": (lambda value: _is_list(value) or _is_regex(value), "a list of names or a pattern"),
    }
    return [
        f"{key} = {reprlib.repr(values[key])} (accepted: {accepted})"
        for key, (is_good, accepted) in checks.items()
        if values.get(key) is not None and not is_good(values[key])
    ]


def _by_pattern(pattern: Mapping[str, _T], module: str, default: _T) -> _T:
    """Return the value of the first pattern that the module's name, or its end after a dot, fits."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _names(named: tuple[str, ...] | str, module: str) -> bool:
    """Tell whether a pattern is all of the module's name, or one of a list its end after a dot."""
    if isinstance(named, str):
        return re.fullmatch(named, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in named)


def _as_names(value: Any) -> Any:
    return tuple(value or ()) if not isinstance(value, str) else value


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _is_regex(value: object) -> bool:
    if not isinstance(value, str) or not value:
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_pattern(value: object, is_good: Any) -> bool:
    return isinstance(value, dict) and all(_is_regex(key) and is_good(item) for key, item in value.items())
