"""Try recipes of quantisation on one bundle, and compare size, accuracy and speed. Writes no file but the plot."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortgpt.bundle.folder import Bundle, open_bundle
from ortgpt.contract import DType
from ortgpt.engine.engine import Engine
from ortgpt.model import LoadedModel
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.divergence import compare
from ortgpt_exporter.evaluation.sample import Ids
from ortgpt_exporter.evaluation.speed import measure_speed
from ortgpt_exporter.progress import Steps
from ortgpt_exporter.quantization.recipe import Recipe
from ortgpt_exporter.quantization.request import W8A8, Quantization
from ortgpt_exporter.quantization.write import check_source, open_engine, open_quantized, write_quantized
from ortgpt_exporter.quantize import calibration_for, load_tokenizer, recipe_for
from ortgpt_exporter.texts import MIN_MEASURED, TextRows, read_text, rows_to_measure
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
    perplexity_ratio: float
    """The perplexity in units of the float32 bundle's."""
    kl: float
    """KL(float32 ‖ quantised) in nats, the mean over tokens."""
    prefill_tokens_per_s: float
    """The speed of a prefill of 128 tokens."""
    decode_tokens_per_s: float
    """The speed of the steps after it."""
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
    source.verify_hashes()
    tokenizer = load_tokenizer(source)
    text = None if eval_text is None else read_text(tokenizer, eval_text, min_tokens=MIN_MEASURED)
    fitting = _fitting(source, tokenizer, RECIPES if recipes is None else recipes)
    model = LoadedModel(source, open_engine(source), tokenizer)
    rows = rows_to_measure(model, text).rows
    steps = Steps(on_progress, len(fitting))
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe, calibration in fitting.items():
            steps.next(str(recipe))
            write_quantized(source, Path(folder), recipe, calibration=calibration)
            trials.append(_trial(source, Path(folder), recipe, model.engine, rows))
    steps.finish()
    return mark_frontier(trials)


def _trial(source: Bundle, folder: Path, recipe: Recipe, baseline: Engine, rows: Sequence[Ids]) -> Trial:
    """Measure the quantised files in `folder`."""
    candidate = open_quantized(source, folder)
    divergence = compare(baseline, candidate, rows)
    (speed,) = measure_speed([candidate])
    return Trial(
        recipe=str(recipe),
        size_bytes=sum(path.stat().st_size for path in folder.iterdir()),
        perplexity_ratio=divergence.perplexity_ratio,
        kl=divergence.kl,
        prefill_tokens_per_s=speed.prefill,
        decode_tokens_per_s=speed.decode,
    )


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
        return trial.size_bytes, trial.kl, -trial.decode_tokens_per_s

    def dominated(trial: Trial) -> bool:
        own = cost(trial)
        others = (cost(other) for other in trials if other is not trial)
        return any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in others)

    return sorted((replace(trial, on_frontier=not dominated(trial)) for trial in trials), key=cost)


def plot_trials(trials: Sequence[Trial], path: Path) -> None:
    """Draw KL divergence against size into a PNG or SVG file, with trials on the frontier filled. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, trial in enumerate(trials, 1):
        face = "tab:blue" if trial.on_frontier else "none"
        label = f"{number}  {trial.recipe}: {trial.decode_tokens_per_s:,.0f} tokens/s"
        point = (trial.size_bytes / 1e6, trial.kl)
        axes.scatter(*point, s=60, facecolor=face, edgecolor="tab:blue", label=label)
        axes.annotate(str(number), point, (6, 4), textcoords="offset points", fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("bundle, MB")
    axes.set_ylabel("KL divergence from float32, nats a token")
    figure.legend(loc="outside right upper", fontsize=8, title="filled: no other is as small, as close and as fast")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
