"""Export GPT-2 checkpoints to ONNX bundles. Needs the [export] extra; the bundles do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortgpt_exporter.errors import ExportError

if TYPE_CHECKING:
    from ortgpt_exporter.export import export_bundle
    from ortgpt_exporter.quantization.request import Quantization
    from ortgpt_exporter.quantize import quantize_bundle

__all__ = ["ExportError", "Quantization", "export_bundle", "quantize_bundle"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and a program may only want to know that the package is there."""
    if name == "export_bundle":
        from ortgpt_exporter.export import export_bundle

        return export_bundle
    if name == "quantize_bundle":
        from ortgpt_exporter.quantize import quantize_bundle

        return quantize_bundle
    if name == "Quantization":
        from ortgpt_exporter.quantization.request import Quantization

        return Quantization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
