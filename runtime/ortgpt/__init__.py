"""Run an exported bundle with ONNX Runtime: load, generate, stream, batch, score, choose, classify. No PyTorch.

Names are imported on first use, so that load() can open a bundle's graph while the rest is imported.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ortgpt.native_call import native_call

if TYPE_CHECKING:
    from ortgpt.classifier import Classifier as Classifier
    from ortgpt.classifier import load_classifier as load_classifier
    from ortgpt.conversation import Conversation as Conversation
    from ortgpt.engine.prefix_cache import PrefixCache as PrefixCache
    from ortgpt.errors import BundleError as BundleError
    from ortgpt.errors import BundleNotFoundError as BundleNotFoundError
    from ortgpt.errors import ClosedError as ClosedError
    from ortgpt.errors import ContextLengthError as ContextLengthError
    from ortgpt.errors import ConversationError as ConversationError
    from ortgpt.errors import DeviceError as DeviceError
    from ortgpt.errors import EngineError as EngineError
    from ortgpt.errors import FormError as FormError
    from ortgpt.errors import FormNotFoundError as FormNotFoundError
    from ortgpt.errors import NonFiniteLogitsError as NonFiniteLogitsError
    from ortgpt.errors import OptionError as OptionError
    from ortgpt.errors import OrtGptError as OrtGptError
    from ortgpt.errors import PromptError as PromptError
    from ortgpt.errors import UnknownOptionError as UnknownOptionError
    from ortgpt.generator import Generator as Generator
    from ortgpt.loading import load as load
    from ortgpt.options.generation_options import GenerationOptions as GenerationOptions
    from ortgpt.results import Choice as Choice
    from ortgpt.results import Classification as Classification
    from ortgpt.results import Completion as Completion
    from ortgpt.results import Evaluation as Evaluation
    from ortgpt.results import Metric as Metric
    from ortgpt.results import Piece as Piece
    from ortgpt.results import Score as Score
    from ortgpt.results import Timings as Timings
    from ortgpt.results import TokenLabel as TokenLabel
    from ortgpt.results import TokenLogprob as TokenLogprob

# From version 1.29 on, importing ONNX Runtime starts telemetry, on Linux too, and keeps an id of the machine in the
# home folder. A later call to turn it off comes too late. A value that the user has set stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"

_MODULE_OF = {
    "BundleError": "errors",
    "BundleNotFoundError": "errors",
    "Choice": "results",
    "Classification": "results",
    "Classifier": "classifier",
    "ClosedError": "errors",
    "Completion": "results",
    "ContextLengthError": "errors",
    "Conversation": "conversation",
    "ConversationError": "errors",
    "DeviceError": "errors",
    "EngineError": "errors",
    "Evaluation": "results",
    "FormError": "errors",
    "FormNotFoundError": "errors",
    "GenerationOptions": "options.generation_options",
    "Generator": "generator",
    "Metric": "results",
    "NonFiniteLogitsError": "errors",
    "OptionError": "errors",
    "OrtGptError": "errors",
    "Piece": "results",
    "PrefixCache": "engine.prefix_cache",
    "PromptError": "errors",
    "Score": "results",
    "Timings": "results",
    "TokenLabel": "results",
    "TokenLogprob": "results",
    "UnknownOptionError": "errors",
    "load": "loading",
    "load_classifier": "classifier",
}
__all__ = [*_MODULE_OF]


if not TYPE_CHECKING:  # type checkers would take every name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with native_call:
            return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
