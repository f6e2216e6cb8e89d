"""The one error that this package raises for bad input."""

from ortgpt.errors import OrtGptError


class ExportError(OrtGptError, ValueError):
    """A checkpoint, bundle or text cannot be used, or a graph does not compute what PyTorch does."""
