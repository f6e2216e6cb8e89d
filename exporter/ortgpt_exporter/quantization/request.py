"""What a caller may ask of a quantisation, and which choices fit together.

Knows no matrix. The command line imports it, so it imports neither torch nor onnx.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortgpt.contract import DType, Flavour
from ortgpt.errors import OptionError, listed, shown
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.texts import read_utf8

BITS = {DType.INT8: 8, DType.INT4: 4}
BLOCK_SIZES = (128, 64, 32, 16)
SEARCH, GPTQ, W8A8 = "scale-search", "gptq", "w8a8"
# Optimum's dynamic quantisation, for the instructions of these CPUs.
DYNAMIC = ("dynamic-avx2", "dynamic-avx512", "dynamic-avx512-vnni", "dynamic-arm64")
# The methods for each flavour and dtype, the default first.
ACCEPTED_METHODS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (Flavour.NATIVE, DType.INT8): (SEARCH, GPTQ, W8A8),
    (Flavour.NATIVE, DType.INT4): (SEARCH, GPTQ),
    (Flavour.PORTABLE, DType.INT8): (W8A8, *DYNAMIC),
    (Flavour.PORTABLE, DType.INT4): (SEARCH, GPTQ),
}
ALL_METHODS = (SEARCH, GPTQ, W8A8, *DYNAMIC)
_MAX_RATIO = {DType.INT8: 1.01, DType.INT4: 1.05}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How to quantise a float32 bundle, and how much accuracy may be lost."""

    dtype: str
    """The precision of the weights: "int8" or "int4"."""
    method: str | None = None
    """How weights are rounded: "scale-search" (the default; portable int8: "w8a8"), "gptq", "w8a8" (int8: one scale a
    row of activations), or Optimum's "dynamic-avx2", "dynamic-avx512", "dynamic-avx512-vnni" and "dynamic-arm64"
    (portable int8)."""
    block_size: int | None = None
    """How many weights share a scale: 128, 64, 32 or 16. By default the largest that divides every matrix, and at most
    64 (int8) or 32 (int4) for embedding and head."""
    head_dtype: str | None = None
    """The precision of embedding and head, "int8" or "int4"; by default `dtype`."""
    fast_prefill: bool = False
    """Whether to add a second graph for prompts, which multiplies whole rows of bytes (native only). In int8 it reads
    the decoder's bytes, whose blocks then share one scale a row, unless `method` or `block_size` is set. Otherwise it
    stores bytes of its own."""
    calibration: str | Path | None = None
    """The UTF-8 file that the method "gptq" reads; it needs one, and no other method accepts one."""
    eval_text: str | Path | None = None
    """The UTF-8 file to measure on; by default 2,048 tokens drawn from the float32 model itself."""
    max_perplexity_ratio: float | None = None
    """The largest accepted ratio to the float32 perplexity, above 1; by default 1.01 (int8) or 1.05 (int4). If the
    ratio is larger, no bundle is written."""
    max_kl: float | None = None
    """The largest accepted mean KL divergence from float32, in nats; by default any."""

    @property
    def max_ratio(self) -> float:
        """The largest accepted ratio of perplexities, the default filled in."""
        return _MAX_RATIO[self.dtype] if self.max_perplexity_ratio is None else self.max_perplexity_ratio


def check_quantization(quantization: Quantization, flavour: str) -> None:
    """Check a request before any work is done.

    Raises OptionError for a value that is not accepted, ExportError for choices that do not fit together or this
    flavour, ModuleNotFoundError where the method needs an extra, OSError or ExportError for a text.
    """
    faults = [
        f"{name} = {shown(value)} (accepted: a number above {low})"
        for name, value, low in (
            ("max_perplexity_ratio", quantization.max_perplexity_ratio, 1),
            ("max_kl", quantization.max_kl, 0),
        )
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > low)
    ]
    if quantization.dtype not in tuple(BITS):
        faults.insert(0, f"dtype = {shown(quantization.dtype)} (accepted: {', '.join(BITS)})")
    if faults:
        raise OptionError(listed(faults))
    method = choose_method(quantization, flavour)
    if method in DYNAMIC:
        import optimum.onnxruntime  # noqa: F401  # to fail before the work, not after it
    calibration = quantization.calibration
    if method != GPTQ and calibration is not None:
        raise ExportError(f"calibration = {calibration} would have no effect (accepted with the method {GPTQ})")
    if method == GPTQ and calibration is None:
        raise ExportError(
            f"the method {GPTQ} needs a calibration text; name a UTF-8 file like the texts that the model will read"
        )
    for text in (calibration, quantization.eval_text):
        if text is not None:
            read_utf8(text)


def choose_method(quantization: Quantization, flavour: str) -> str:
    """Return the method, the default filled in. Raises ExportError for choices that fit no network."""
    accepted = ACCEPTED_METHODS.get((flavour, quantization.dtype))
    if accepted is None:
        raise ExportError(f"dtype = {shown(quantization.dtype)} (accepted: {', '.join(BITS)})")
    method = accepted[0] if quantization.method is None else quantization.method
    if method not in accepted:
        raise ExportError(
            f"method = {shown(method)} with {flavour} {quantization.dtype} (accepted: {', '.join(accepted)})"
        )
    choices: Mapping[str, tuple[object, ...]] = {"block_size": BLOCK_SIZES, "head_dtype": tuple(BITS)}
    values = {name: getattr(quantization, name) for name in choices if getattr(quantization, name) is not None}
    if values and method in (W8A8, *DYNAMIC):
        raise ExportError(
            f"{' and '.join(values)} would have no effect (accepted with the methods in blocks, not {method})"
        )
    if quantization.fast_prefill and (flavour != Flavour.NATIVE or method == W8A8):
        raise ExportError(
            f"fast_prefill would have no effect (accepted with {Flavour.NATIVE} graphs and the methods in blocks)"
        )
    faults = [
        f"{name} = {shown(value)} (accepted: {', '.join(map(str, choices[name]))})"
        for name, value in values.items()
        if type(value) is not type(choices[name][0]) or value not in choices[name]
    ]
    if faults:
        raise ExportError(listed(faults))
    return method
