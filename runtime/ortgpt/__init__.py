"""Run an exported GPT-2 bundle with ONNX Runtime: load, generate, stream, batch, score. Needs no PyTorch."""

from ortgpt.errors import (
    BundleError,
    BundleNotFoundError,
    ClosedError,
    ContextLengthError,
    DeviceError,
    EngineError,
    NonFiniteLogitsError,
    OptionError,
    OrtGptError,
    PromptError,
    UnknownOptionError,
)
from ortgpt.generator import Completion, Generator, Piece, load
from ortgpt.options import GenerationOptions
from ortgpt.scoring import Score

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "BundleNotFoundError",
    "ClosedError",
    "Completion",
    "ContextLengthError",
    "DeviceError",
    "EngineError",
    "GenerationOptions",
    "Generator",
    "NonFiniteLogitsError",
    "OptionError",
    "OrtGptError",
    "Piece",
    "PromptError",
    "Score",
    "UnknownOptionError",
    "load",
]
