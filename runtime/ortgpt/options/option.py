"""What is known of one option, declared once as the metadata of its field in GenerationOptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ortgpt.options.validation import Rule


@dataclass(frozen=True)
class Flag:
    """A flag of the command line that sets an option."""

    name: str
    """The flag, "--top-k" for example."""
    metavar: str = ""
    """What stands for its value in the help; empty for a flag without one."""
    type: type = str
    """The type that the text is converted to."""
    repeatable: bool = False
    help: str = ""
    """The help, where it differs from that of the option."""
    in_chat: bool = True
    """Whether `ortgpt chat` has the flag too."""


@dataclass(frozen=True)
class Option:
    """One generation option: its meaning, its values, its default and its other names."""

    rule: Rule
    help: str
    """What it does, in one sentence."""
    default: Any
    """The value where neither the call nor the bundle gives one."""
    default_text: str
    from_bundle: bool
    """Whether a bundle's generation_config.json may give a default."""
    flags: tuple[Flag, ...]
    elsewhere: tuple[str, ...]
    """What other programs call it."""
    bundle_key: str = ""
    """Its key in a generation_config.json, where that is not its name."""

    @property
    def accepted(self) -> str:
        """The values it takes, in words."""
        return self.rule.accepted

    @property
    def flag(self) -> str | None:
        """Its flags on the command line; None for an option that only Python has."""
        return ", ".join(flag.name for flag in self.flags) or None


def option(
    rule: Rule,
    help: str,
    *flags: Flag,
    default: Any = None,
    default_text: str | None = None,
    from_bundle: bool = False,
    bundle_key: str = "",
    elsewhere: tuple[str, ...] = (),
) -> Any:
    """Declare a field of GenerationOptions; unset, it is None."""
    text = default_text if default_text is not None else "" if default is None else str(default)
    declared = Option(rule, help, default, text, from_bundle, flags, elsewhere, bundle_key)
    return field(default=None, metadata={"option": declared})
