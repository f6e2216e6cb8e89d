"""The error that this package raises for bad input."""


class ModelError(ValueError):
    """A checkpoint, configuration or text cannot be used; the message says why, and what is accepted."""
