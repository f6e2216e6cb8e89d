"""Export checkpoints of GPT-2 and GPT-1 to ONNX bundles, and quantise bundles. Needs the extra [export]."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortgpt_exporter.errors import ExportError

if TYPE_CHECKING:
    from ortgpt_exporter.checkpoint.load import CheckpointSource as CheckpointSource
    from ortgpt_exporter.export import export_bundle as export_bundle
    from ortgpt_exporter.quantization.request import Quantization as Quantization
    from ortgpt_exporter.quantize import quantize_bundle as quantize_bundle

_MODULE_OF = {
    "CheckpointSource": "checkpoint.load",
    "Quantization": "quantization.request",
    "export_bundle": "export",
    "quantize_bundle": "quantize",
}
__all__ = ["ExportError", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a name on first use: importing torch takes seconds."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
