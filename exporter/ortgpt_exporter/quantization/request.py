"""What a caller may ask of a quantisation, and which choices fit together.

Knows no matrix. The command line imports it, so it imports neither torch nor onnx.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from ortgpt.contract import DType, Flavour
from ortgpt.errors import OptionError, listed, shown
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.texts import read_utf8

BITS = {DType.INT8: 8, DType.INT4: 4}
BLOCK_SIZES = (128, 64, 32, 16)
PADDED_SIZES = (32, 16)  # where none divides every row; larger blocks would be padded with many zeros
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


def setting(
    help: str, kind: type, *, default: Any = None, choices: Sequence[Any] = (), above: float = -math.inf, flag: str = ""
) -> Any:
    """Declare a field of Quantization: one of `choices`, or a number larger than `above`; `flag` is its own flag."""
    metadata = {"help": help, "kind": kind, "choices": choices, "above": above, "flag": flag}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Say how to quantise a float32 bundle, and how much accuracy may be lost.

    The metadata of each field has its meaning as "help". Raises OptionError naming every value that is not accepted.
    """

    dtype: str = setting("Precision of the weights.", str, default=MISSING, choices=tuple(BITS))
    method: str | None = setting(
        "How weights are rounded. gptq: by the calibration text. w8a8 (int8): one scale for each row of weights and of "
        "activations. dynamic-...: Optimum's, portable int8 only. [default: scale-search; portable int8: w8a8]",
        str,
        choices=ALL_METHODS,
    )
    block_size: int | None = setting(
        f"Weights that share a scale: {', '.join(map(str, BLOCK_SIZES[:-1]))} or {BLOCK_SIZES[-1]}. "
        "[default: the largest that divides every matrix, or 32 if none does; at most 64 (int8) or 32 (int4) for "
        "embedding and head]",
        int,
        choices=BLOCK_SIZES,
    )
    head_dtype: str | None = setting(
        "Precision of embedding and head. [default: as the rest]", str, choices=tuple(BITS)
    )
    calibration: str | Path | None = setting(  # noqa: RUF009  # returns a field
        "UTF-8 text for the method gptq, which needs one.", Path
    )
    eval_text: str | Path | None = setting(  # noqa: RUF009  # returns a field
        "UTF-8 text to measure on. [default: 2,048 tokens drawn from the float32 model]", Path, flag="--eval"
    )
    max_perplexity_ratio: float | None = setting(
        "Write no bundle if the ratio to the float32 perplexity is larger. "
        f"[default: {', '.join(f'{dtype} {ratio}' for dtype, ratio in _MAX_RATIO.items())}]",
        float,
        above=1,
    )
    max_kl: float | None = setting(
        "Write no bundle if the mean KL divergence, in nats, is larger. [default: any]", float, above=0
    )

    def __post_init__(self) -> None:
        accepted = {}
        for each in fields(self):
            value, kind, choices = getattr(self, each.name), each.metadata["kind"], each.metadata["choices"]
            if value is None and each.default is None:
                continue
            if each.name != "method" and choices and (type(value) is not kind or value not in choices):
                accepted[each.name] = ", ".join(map(str, choices))  # which methods are accepted, the flavour decides
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if kind is float and not (is_number and value > each.metadata["above"]):
                accepted[each.name] = f"a number above {each.metadata['above']}"
            if kind is bool and not isinstance(value, bool):
                accepted[each.name] = "True or False"
            if kind is Path and not isinstance(value, (str, os.PathLike)):
                accepted[each.name] = "the path of a UTF-8 text"
        if accepted:
            template = listed([f"{{{name}}} (accepted: {values})" for name, values in accepted.items()])
            raise OptionError(template, {name: getattr(self, name) for name in accepted})

    @property
    def max_ratio(self) -> float:
        """The largest accepted ratio of perplexities, the default filled in."""
        return _MAX_RATIO[self.dtype] if self.max_perplexity_ratio is None else self.max_perplexity_ratio


def check_type(quantization: object) -> Quantization:
    """Return a Quantization as it is. Raises OptionError for anything else."""
    if not isinstance(quantization, Quantization):
        raise OptionError.bad_value("quantization", quantization, "a Quantization")
    return quantization


def check_quantization(quantization: Quantization, flavour: str) -> None:
    """Check a request before any work is done.

    Raises ExportError for choices that do not fit together or this flavour, ModuleNotFoundError where the method needs
    an extra, OSError or ExportError for a text.
    """
    check_type(quantization)
    method = choose_method(quantization, flavour)
    if method in DYNAMIC:
        import optimum.onnxruntime  # noqa: F401  # to fail before the work, not after it
    calibration = quantization.calibration
    if method != GPTQ and calibration is not None:
        raise ExportError(f"calibration = {calibration} would have no effect (accepted with the method {GPTQ})")
    if method == GPTQ and calibration is None:
        raise ExportError(
            f"the method {GPTQ} needs a calibration text (--calibration FILE, calibration=): a UTF-8 file like what "
            "the model will read"
        )
    for text in (calibration, quantization.eval_text):
        if text is not None:
            read_utf8(text)


def choose_method(quantization: Quantization, flavour: str) -> str:
    """Return the method, the default filled in. Raises ExportError for choices that fit no network."""
    accepted = ACCEPTED_METHODS[flavour, quantization.dtype]
    method = accepted[0] if quantization.method is None else quantization.method
    if method not in accepted:
        raise ExportError(
            f"method = {shown(method)} with {flavour} {quantization.dtype} (accepted: {', '.join(accepted)})"
        )
    blocks = [name for name in ("block_size", "head_dtype") if getattr(quantization, name) is not None]
    if blocks and method in (W8A8, *DYNAMIC):
        raise ExportError(
            f"{' and '.join(blocks)} would have no effect (accepted with the methods in blocks, not {method})"
        )
    return method
