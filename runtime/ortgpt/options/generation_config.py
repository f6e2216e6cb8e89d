"""The defaults that a bundle's generation_config.json gives, as options. Knows no model and no file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ortgpt.errors import listed, shown
from ortgpt.options.generation_options import OPTIONS, GenerationOptions

# Keys of a generation_config.json that have no bearing here; any other unknown one is logged when the bundle is loaded.
_WITHOUT_BEARING = frozenset(
    {"transformers_version", "_from_model_config", "bos_token_id", "pad_token_id", "use_cache", "output_attentions",
     "output_hidden_states", "return_dict_in_generate", "output_scores"}
)  # fmt: skip

_logger = logging.getLogger(__name__)


def read_generation_config(values: Mapping[str, Any], fallback_eos: Iterable[int]) -> GenerationOptions:
    """Return the defaults that a parsed generation_config.json gives; other keys that have a bearing are logged.

    Raises OptionError for a value that is not accepted.
    """
    taken = {
        name: values[name] for name, option in OPTIONS.items() if option.from_bundle and values.get(name) is not None
    }
    ignored = [
        f"{key if key.isidentifier() else shown(key)} = {shown(value)}"
        for key, value in values.items()
        if value is not None and key not in taken and key not in _WITHOUT_BEARING and not _is_neutral(key, value)
    ]
    if ignored:
        _logger.warning("generation_config.json has keys that this version does not use: %s", listed(ignored))
    return GenerationOptions(**({"eos_token_id": fallback_eos} | taken))


def _is_neutral(key: str, value: object) -> bool:
    """Tell whether a value is that of an option that is left alone."""
    option = OPTIONS.get(key)
    return option is not None and option.default is not None and bool(option.default == value)
