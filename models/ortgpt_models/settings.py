"""Settings of a training, each declared once for its check and for its flag on the command line. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any

from ortgpt_models.errors import ModelError

_LIMITS = ("least", "most", "above")


def setting(default: Any, help: str, *, least: float = 0, most: float = math.inf, above: float = -1) -> Any:
    """Declare a field that is accepted from `least`, and above `above`, to `most`."""
    return field(default=default, metadata={"help": help, "least": least, "most": most, "above": above})


def check_settings(config: Any) -> None:
    """Raise ModelError naming every field of a dataclass of settings that is out of range."""
    faults = []
    for each in fields(config):
        value, least, most, above = getattr(config, each.name), *(each.metadata[key] for key in _LIMITS)
        if not (least <= value <= most and above < value < math.inf):
            accepted = f"{least} to {most}" if most < math.inf else f"{least} or more"
            faults.append(f"{each.name} = {value} (accepted: {'above 0' if above == 0 else accepted})")
    if faults:
        raise ModelError("unusable training configuration: " + "; ".join(faults))
