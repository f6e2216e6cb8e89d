"""The one error that this package raises for bad input."""


class ModelError(ValueError):
    """A checkpoint, configuration or text that this package cannot use; the message says why and what it accepts."""
