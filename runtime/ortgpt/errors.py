"""Every error that this package raises. Each is an OrtGptError and also the built-in that fits."""


class OrtGptError(Exception):
    """Base of all errors of this package."""


class BundleError(OrtGptError, ValueError):
    """A bundle that is damaged, incomplete or of a kind that this version cannot run."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """No bundle at the path given."""

    def __str__(self) -> str:
        return str(self.args[0])


class DeviceError(OrtGptError, RuntimeError):
    """The device asked for, or ONNX Runtime itself, is not usable here."""


class OptionError(OrtGptError, ValueError):
    """A generation option with a value out of range or without effect."""


class UnknownOptionError(OrtGptError, TypeError):
    """A generation option that does not exist."""


class PromptError(OrtGptError, ValueError):
    """A prompt that is no text and no sequence of token ids of this vocabulary."""


class ContextLengthError(OrtGptError, ValueError):
    """Prompt and tokens to generate do not fit the model's context."""


class NonFiniteLogitsError(OrtGptError, ArithmeticError):
    """The model computed NaN or infinity."""


class EngineError(OrtGptError, RuntimeError):
    """ONNX Runtime failed while running the graph."""


class ConversationError(OrtGptError, RuntimeError):
    """A turn of a conversation was begun while another was still open."""


class ClosedError(OrtGptError, RuntimeError):
    """The generator was used after it was closed."""
