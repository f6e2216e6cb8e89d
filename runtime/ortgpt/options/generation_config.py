"""The defaults that a bundle's generation_config.json gives, as options. Knows no model and no file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ortgpt.errors import listed, shown
from ortgpt.options.generation_options import OPTIONS, GenerationOptions

# Keys of a generation_config.json without effect here: on the file's origin, on what `transformers` returns, on its
# cache and speed, and on encoder-decoders. Any other one that is not taken is logged when the bundle is loaded.
_WITHOUT_EFFECT = frozenset(
    {"transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash", "bos_token_id",
     "pad_token_id", "decoder_start_token_id", "output_attentions", "output_hidden_states", "output_scores",
     "output_logits", "return_dict_in_generate", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
     "low_memory", "compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config",
     "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
     "assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind",
     "prompt_lookup_num_tokens", "max_matching_ngram_size", "use_mtp", "speculation_type"}
)  # fmt: skip
# Values of settings that are no option here with which `transformers` generates as without them.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "top_h": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "begin_suppress_tokens": ([],),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "token_healing": (False,),
}

# The name of each option that a generation_config.json may set, by its key there.
_TAKEN = {option.bundle_key or name: name for name, option in OPTIONS.items() if option.from_bundle}

_logger = logging.getLogger(__name__)


def read_generation_config(values: Mapping[str, Any], fallback_eos: Iterable[int]) -> GenerationOptions:
    """Return the defaults that a parsed generation_config.json gives; other keys that change the text are logged.

    Raises OptionError for a value that is not accepted.
    """
    ignored = settings_not_taken(values)
    if ignored:
        _logger.warning("generation_config.json has keys that this version does not use: %s", listed(ignored))
    return read_defaults(values, fallback_eos)


def read_defaults(values: Mapping[str, Any], fallback_eos: Iterable[int]) -> GenerationOptions:
    """Do as read_generation_config(), and log nothing."""
    taken = {name: values[key] for key, name in _TAKEN.items() if values.get(key) is not None}
    return GenerationOptions(**({"eos_token_id": fallback_eos} | taken))


def settings_not_taken(values: Mapping[str, Any]) -> list[str]:
    """Return each setting of a generation_config.json that changes the text and is not taken, as "key = value"."""
    return [
        f"{key if key.isidentifier() else shown(key)} = {shown(value)}"
        for key, value in values.items()
        if key not in _TAKEN and changes_text(key, value)
    ]


def changes_text(key: str, value: object) -> bool:
    """Tell whether a setting of a generation_config.json changes what `transformers` generates."""
    return value is not None and key not in _WITHOUT_EFFECT and not _is_neutral(key, value)


def _is_neutral(key: str, value: object) -> bool:
    """Tell whether a value is that of an option, or of a setting of `transformers`, that is left alone."""
    option = OPTIONS.get(_TAKEN.get(key, key))
    if option is not None and option.default is not None and option.default == value:
        return True
    return value in _NEUTRAL.get(key, ())
