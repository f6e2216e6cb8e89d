"""Run an exported bundle with ONNX Runtime: load, generate, stream, batch, score, choose, classify. No PyTorch."""

import os

# From version 1.29 on, importing ONNX Runtime starts telemetry, on Linux too, and keeps an id of the machine in the
# home folder. A later call to turn it off comes too late. A value that the user has set stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# First, since numpy's import took 20 ms longer on Python 3.11 where it began deep inside the imports below.
import numpy as _numpy  # noqa: F401

from ortgpt.classifier import Classifier, load_classifier
from ortgpt.conversation import Conversation
from ortgpt.engine.prefix_cache import PrefixCache
from ortgpt.errors import (
    BundleError,
    BundleNotFoundError,
    ClosedError,
    ContextLengthError,
    ConversationError,
    DeviceError,
    EngineError,
    FormError,
    FormNotFoundError,
    NonFiniteLogitsError,
    OptionError,
    OrtGptError,
    PromptError,
    UnknownOptionError,
)
from ortgpt.generator import Generator, load
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.results import (
    Choice,
    Classification,
    Completion,
    Evaluation,
    Metric,
    Piece,
    Score,
    Timings,
    TokenLabel,
    TokenLogprob,
)

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "BundleNotFoundError",
    "Choice",
    "Classification",
    "Classifier",
    "ClosedError",
    "Completion",
    "ContextLengthError",
    "Conversation",
    "ConversationError",
    "DeviceError",
    "EngineError",
    "Evaluation",
    "FormError",
    "FormNotFoundError",
    "GenerationOptions",
    "Generator",
    "Metric",
    "NonFiniteLogitsError",
    "OptionError",
    "OrtGptError",
    "Piece",
    "PrefixCache",
    "PromptError",
    "Score",
    "Timings",
    "TokenLabel",
    "TokenLogprob",
    "UnknownOptionError",
    "load",
    "load_classifier",
]
