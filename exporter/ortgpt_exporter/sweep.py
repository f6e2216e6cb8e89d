"""Try recipes of quantisation on one bundle, and compare size, accuracy and speed. Writes no file but the plot."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortgpt.bundle.folder import Bundle, open_bundle
from ortgpt.contract import DType
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.divergence import Divergence, compare
from ortgpt_exporter.evaluation.speed import Speed, measure_speed
from ortgpt_exporter.judges import calibration_for, open_float32
from ortgpt_exporter.progress import Steps
from ortgpt_exporter.quantization.recipe import Recipe
from ortgpt_exporter.quantization.request import W8A8, Quantization
from ortgpt_exporter.quantization.write import check_source, open_quantized, write_quantized
from ortgpt_exporter.quantize import recipe_for
from ortgpt_exporter.texts import TextRows, rows_to_measure
from ortgpt_models.progress import OnProgress

RECIPES = (
    Quantization(dtype=DType.INT8),
    Quantization(dtype=DType.INT8, block_size=32),
    Quantization(dtype=DType.INT8, method=W8A8),
    Quantization(dtype=DType.INT4),
    Quantization(dtype=DType.INT4, block_size=128),
    Quantization(dtype=DType.INT4, block_size=32),
    Quantization(dtype=DType.INT4, head_dtype=DType.INT8),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one recipe costs, and what it gains."""

    recipe: str
    """The recipe in a few words."""
    size_bytes: int
    """The size of the bundle in bytes."""
    divergence: Divergence
    """How its predictions differ from those of the float32 bundle."""
    speed: Speed
    """Its speed on the CPU."""
    on_frontier: bool = False
    """Whether no other trial is at least as small, as close to float32 and as fast, and better in one of the three."""


def sweep_bundle(
    bundle: str | Path,
    *,
    recipes: Sequence[Quantization] | None = None,
    eval_text: Path | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> list[Trial]:
    """Try every recipe that fits the matrices of a float32 bundle, and return the trials, smallest first.

    `recipes` are RECIPES by default; `eval_text` is a UTF-8 file to measure on, by default 2,048 tokens drawn from the
    model. Raises ExportError for a bundle that is not float32 or a text that cannot be used, BundleError or OSError.
    """
    source = open_bundle(bundle)
    check_source(source)
    if source.labels is not None:
        raise ExportError(
            f"{source.path} is a classifier, and a sweep compares language models; quantise it with one recipe"
        )
    source.verify_hashes()
    model = open_float32(source)
    fitting = _fitting(source, model.tokenizer, RECIPES if recipes is None else recipes)
    rows = rows_to_measure(model, eval_text).rows
    steps = Steps(on_progress, len(fitting))
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe, calibration in fitting.items():
            steps.next(str(recipe))
            write_quantized(source, Path(folder), recipe, calibration=calibration)
            candidate = open_quantized(source, Path(folder))
            divergence = compare(model.engine, candidate, rows)
            (speed,) = measure_speed([candidate])
            size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
            trials.append(Trial(recipe=str(recipe), size_bytes=size_bytes, divergence=divergence, speed=speed))
    steps.finish()
    return mark_frontier(trials)


def _fitting(source: Bundle, tokenizer: Tokenizer, recipes: Sequence[Quantization]) -> dict[Recipe, TextRows | None]:
    """Return the recipes that fit the matrices, each with its calibration text. Raises ExportError if none fits."""
    fitting: dict[Recipe, TextRows | None] = {}
    fault = ExportError("there are no recipes to try; name at least one")
    for quantization in recipes:
        try:
            recipe = recipe_for(source, quantization)
            fitting[recipe] = calibration_for(source, recipe, tokenizer, quantization)
        except ExportError as error:
            fault = error
    if not fitting:
        raise fault
    return fitting


def mark_frontier(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials, smallest first; those that no other trial dominates are marked."""

    def cost(trial: Trial) -> tuple[float, float, float]:
        return trial.size_bytes, trial.divergence.kl, -trial.speed.decode

    def dominated(trial: Trial) -> bool:
        own = cost(trial)
        others = (cost(other) for other in trials if other is not trial)
        return not math.isfinite(trial.divergence.kl) or any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in others
        )

    return sorted((replace(trial, on_frontier=not dominated(trial)) for trial in trials), key=cost)


def plot_trials(trials: Sequence[Trial], path: Path) -> None:
    """Draw KL divergence against size into a PNG or SVG file, with trials on the frontier filled. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, trial in enumerate(trials, 1):
        face = "tab:blue" if trial.on_frontier else "none"
        label = f"{number}  {trial.recipe}: {trial.speed.decode:,.0f} tokens/s"
        point = (trial.size_bytes / 1e6, trial.divergence.kl)
        axes.scatter(*point, s=60, facecolor=face, edgecolor="tab:blue", label=label)
        axes.annotate(str(number), point, (6, 4), textcoords="offset points", fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("bundle, MB")
    axes.set_ylabel("KL divergence from float32, nats per token")
    figure.legend(loc="outside right upper", fontsize=8, title="filled: no other is as small, as close and as fast")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
