"""The one error that this package raises of its own."""

from ortgpt.errors import OrtGptError


class ExportError(OrtGptError, ValueError):
    """A checkpoint that cannot be exported faithfully, or a graph that did not come out as it must."""
