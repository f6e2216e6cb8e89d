"""The defaults that a bundle's generation_config.json states, as options. Knows no model and no file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ortgpt.messages import listed, shown
from ortgpt.options import FROM_BUNDLE, NEUTRAL, GenerationOptions

# Keys of a generation_config.json that have no bearing here; any other unknown one is logged when the bundle is loaded.
_WITHOUT_BEARING = frozenset(
    {"transformers_version", "_from_model_config", "bos_token_id", "pad_token_id", "use_cache", "output_attentions",
     "output_hidden_states", "return_dict_in_generate", "output_scores"}
)  # fmt: skip

_logger = logging.getLogger(__name__)


def read_generation_config(values: Mapping[str, Any], fallback_eos: Iterable[int]) -> GenerationOptions:
    """Return the defaults that a bundle's generation_config.json states; other keys with a bearing are logged.

    Raises OptionError for a value that is not accepted.
    """
    ignored = [
        f"{shown(key) if not key.isidentifier() else key} = {shown(value)}"
        for key, value in values.items()
        if value is not None and key not in (*FROM_BUNDLE, *_WITHOUT_BEARING) and NEUTRAL.get(key) != value
    ]
    if ignored:
        _logger.warning("generation_config.json has keys that this version does not use: %s", listed(ignored))
    known = {name: values[name] for name in FROM_BUNDLE if values.get(name) is not None}
    return GenerationOptions(**({"eos_token_id": fallback_eos} | known))
