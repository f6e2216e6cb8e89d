"""Settings of a training, each declared once for its check and for its flag on the command line. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

from ortgpt_models.errors import ModelError

_LIMITS = ("least", "most", "above")


def setting(
    default: Any,
    help: str,
    *,
    kind: type | None = None,
    choices: Sequence[str] = (),
    least: float = 0,
    most: float = math.inf,
    above: float = -1,
) -> Any:
    """Declare a field that is one of `choices`, or accepted from `least`, and above `above`, to `most`.

    `kind` is the type of its values, which a default of None does not tell; None itself is always accepted then.
    """
    metadata = {"help": help, "kind": kind or type(default), "choices": tuple(choices)}
    return field(default=default, metadata=metadata | {"least": least, "most": most, "above": above})


def check_settings(config: Any) -> None:
    """Raise ModelError naming every field of a dataclass of settings that is out of range."""
    faults = []
    for each in fields(config):
        value, accepted = getattr(config, each.name), _accepted(each.metadata)
        if not (value is None and each.default is None) and not _is_accepted(value, each.metadata):
            faults.append(f"{each.name} = {value} (accepted: {accepted})")
    if faults:
        raise ModelError("unusable training configuration: " + "; ".join(faults))


def _is_accepted(value: Any, metadata: Any) -> bool:
    if metadata["choices"]:
        return value in metadata["choices"]
    least, most, above = (metadata[key] for key in _LIMITS)
    return bool(least <= value <= most and above < value < math.inf)


def _accepted(metadata: Any) -> str:
    least, most, above = (metadata[key] for key in _LIMITS)
    if metadata["choices"]:
        return ", ".join(metadata["choices"])
    if above == 0:
        return f"above 0, at most {most}" if most < math.inf else "a finite number above 0"
    return f"{least} to {most}" if most < math.inf else f"{least} or more"
