"""Run an exported GPT-2 bundle with ONNX Runtime: load, generate, stream, batch, score, choose. Needs no PyTorch."""

import os

# ONNX Runtime 1.29 and later send telemetry from Linux, too, and keep an id of the machine in the home folder, from
# their import on; a call to turn it off comes too late.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from ortgpt.completion import Completion, Piece
from ortgpt.conversation import Conversation
from ortgpt.errors import (
    BundleError,
    BundleNotFoundError,
    ClosedError,
    ContextLengthError,
    ConversationError,
    DeviceError,
    EngineError,
    NonFiniteLogitsError,
    OptionError,
    OrtGptError,
    PromptError,
    UnknownOptionError,
)
from ortgpt.generator import Generator, load
from ortgpt.logprobs import TokenLogprob
from ortgpt.options import GenerationOptions
from ortgpt.prefixes import PrefixCache
from ortgpt.rows import Timings
from ortgpt.scoring import Choice, Score

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "BundleNotFoundError",
    "Choice",
    "ClosedError",
    "Completion",
    "ContextLengthError",
    "Conversation",
    "ConversationError",
    "DeviceError",
    "EngineError",
    "GenerationOptions",
    "Generator",
    "NonFiniteLogitsError",
    "OptionError",
    "OrtGptError",
    "Piece",
    "PrefixCache",
    "PromptError",
    "Score",
    "Timings",
    "TokenLogprob",
    "UnknownOptionError",
    "load",
]
