"""Every error that this package raises, and how a message shows a value.

Each error is an OrtGptError and also the built-in that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

_MAX_LETTERS = 80
_MAX_PARTS = 20


def shown(value: object) -> str:
    """Return a value as a message shows it: its repr, 80 characters at most."""
    text = repr(value)
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 3]}..."


def listed(parts: Sequence[str], separator: str = "; ") -> str:
    """Join the first 20 parts with a separator, and say how many more there are."""
    more = len(parts) - _MAX_PARTS
    return separator.join(parts[:_MAX_PARTS]) + (f"{separator}and {more} more" if more > 0 else "")


class OrtGptError(Exception):
    """Base of all errors of this package."""

    def at(self, place: str) -> Self:
        """Return the error with a message that begins with a place, a line of a file for example."""
        return type(self)(f"{place}: {self}")


class BundleError(OrtGptError, ValueError):
    """A bundle is damaged, incomplete, or of a kind that this version cannot run."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """There is no bundle at the path."""

    def __str__(self) -> str:
        return str(self.args[0])


class FormError(OrtGptError, ValueError):
    """The form of a task cannot be read, or has faults."""


class FormNotFoundError(FormError, FileNotFoundError):
    """There is no form of this name, or no file at the path."""

    def __str__(self) -> str:
        return str(self.args[0])


class DeviceError(OrtGptError, RuntimeError):
    """The requested device, or ONNX Runtime itself, is not usable on this machine."""


class Mention:
    """An option as a message mentions it: `str()` gives name and value, `name` the name alone."""

    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self._value = value

    def __str__(self) -> str:
        return f"{self.name} = {shown(self._value)}"


class OptionError(OrtGptError, ValueError):
    """An option has a value that is not accepted, or would have no effect.

    `template` is the message. Where it mentions an option it has a field in braces: `{top_k}` becomes "top_k = 5",
    `{top_k.name}` becomes "top_k". `options` has the values by name, `parts` any other fields. So an interface that
    calls its options otherwise, a command line for example, can word the message with its own names.
    """

    def __init__(self, template: str, options: Mapping[str, object] = MappingProxyType({}), /, **parts: object) -> None:
        self._template = template
        self._options = dict(options)
        self._parts = parts
        super().__init__(self.worded(Mention))

    @classmethod
    def bad_value(cls, name: str, value: object, accepted: str) -> OptionError:
        """Make the error for a value that is not accepted."""
        return cls(f"{{{name}}} (accepted: {{accepted}})", {name: value}, accepted=accepted)

    def worded(self, mention: Callable[[str, object], Mention]) -> str:
        """Return the message with each option as `mention(name, value)` has it."""
        if not self._options and not self._parts:
            return self._template
        mentions = {name: mention(name, value) for name, value in self._options.items()}
        return self._template.format(**mentions, **self._parts)

    def at(self, place: str) -> Self:
        """Return the error with a message that begins with a place, and that still mentions its options."""
        if not self._options and not self._parts:
            return super().at(place)
        return type(self)("{place}: " + self._template, self._options, place=place, **self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message alone: the values of options may be anything."""
        return type(self), (str(self),)


class UnknownOptionError(OrtGptError, TypeError):
    """There is no generation option of this name."""


class PromptError(OrtGptError, ValueError):
    """A prompt is neither text nor a sequence of token ids of this vocabulary."""


class ContextLengthError(OrtGptError, ValueError):
    """Prompt and new tokens together, or a text to embed, exceed the model's context."""


class NonFiniteLogitsError(OrtGptError, ArithmeticError):
    """The model computed NaN or infinity."""


class EngineError(OrtGptError, RuntimeError):
    """ONNX Runtime failed while it ran the graph."""


class ConversationError(OrtGptError, RuntimeError):
    """A turn of a conversation began while another was still open."""


class ClosedError(OrtGptError, RuntimeError):
    """The generator was used after it was closed, or in a forked process."""
