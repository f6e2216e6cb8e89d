"""Try the recipes of quantisation on one bundle, and say what each costs and brings. Writes nothing but the plot."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ortgpt
from ortgpt.bundle.folder import Bundle, open_bundle
from ortgpt.contract import DType, Target
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.divergence import compare
from ortgpt_exporter.evaluation.speed import measure_speed
from ortgpt_exporter.progress import OnProgress, Steps
from ortgpt_exporter.quantization.recipe import W8A8, Recipe
from ortgpt_exporter.quantization.request import Quantization
from ortgpt_exporter.quantization.write import check_source, open_quantized, write_quantized
from ortgpt_exporter.quantize import calibration_for, recipe_for
from ortgpt_exporter.texts import MIN_MEASURED, TextRows, read_text, rows_to_measure

RECIPES = (
    Quantization(dtype=DType.INT8),
    Quantization(dtype=DType.INT8, block_size=32),
    Quantization(dtype=DType.INT8, method=W8A8),
    Quantization(dtype=DType.INT4),
    Quantization(dtype=DType.INT4, block_size=128),
    Quantization(dtype=DType.INT4, block_size=32),
    Quantization(dtype=DType.INT4, head_dtype=DType.INT8),
    Quantization(dtype=DType.INT4, method="rtn", block_size=32),
    Quantization(dtype=DType.INT4, method="k-quant", block_size=32),
    Quantization(dtype=DType.INT4, method="hqq", block_size=32),
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A recipe in a few words, its size in bytes, its loss against float32, and its speed in tokens per second.

    `on_frontier` unless another trial is no larger, no worse and no slower, and better in one of them.
    """

    recipe: str
    size_bytes: int
    perplexity_ratio: float
    kl: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    on_frontier: bool = False


def sweep_bundle(
    bundle: str | Path,
    *,
    recipes: Sequence[Quantization] | None = None,
    eval_text: Path | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> list[Trial]:
    """Try every recipe that fits the matrices of a float32 bundle; return the trials, smallest first.

    Raises ExportError for a bundle of another kind or a text that cannot be used, BundleError or OSError.
    """
    source = open_bundle(bundle)
    check_source(source)
    tokenizer = Tokenizer.load(source.path)
    given = None if eval_text is None else read_text(tokenizer, eval_text, least=MIN_MEASURED)
    fitting = _fitting(source, tokenizer, RECIPES if recipes is None else recipes)
    trials = []
    with ortgpt.load(source.path, device=Target.CPU) as generator, tempfile.TemporaryDirectory() as folder:
        rows = rows_to_measure(generator, given).rows
        steps = Steps(on_progress, len(fitting))
        for recipe, calibration in fitting.items():
            steps.next(recipe.shown)
            write_quantized(source, Path(folder), recipe, calibration=calibration)
            candidate = open_quantized(source, Path(folder))
            size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
            likeness = compare(generator.engine, candidate, rows)
            (speed,) = measure_speed([candidate])
            del candidate
            trials.append(
                Trial(
                    recipe=recipe.shown,
                    size_bytes=size_bytes,
                    perplexity_ratio=likeness.perplexity_ratio,
                    kl=likeness.kl,
                    prefill_tokens_per_s=speed.prefill,
                    decode_tokens_per_s=speed.decode,
                )
            )
        steps.finish()
    return mark_frontier(trials)


def _fitting(source: Bundle, tokenizer: Tokenizer, recipes: Sequence[Quantization]) -> dict[Recipe, TextRows | None]:
    """Return the recipes that fit the matrices, each with its calibration text. Raises ExportError where none does."""
    fitting: dict[Recipe, TextRows | None] = {}
    fault = ExportError("a sweep wants recipes to try")
    for asked in recipes:
        try:
            recipe = recipe_for(source, asked)
            fitting[recipe] = calibration_for(source, recipe, tokenizer, asked.calibration)
        except ExportError as error:
            fault = error
    if not fitting:
        raise fault
    return fitting


def mark_frontier(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials by size, those marked that no other beats."""

    def cost(trial: Trial) -> tuple[float, float, float]:
        return trial.size_bytes, trial.kl, -trial.decode_tokens_per_s

    def beaten(trial: Trial) -> bool:
        mine = cost(trial)
        others = (cost(other) for other in trials if other is not trial)
        return any(theirs != mine and all(a <= b for a, b in zip(theirs, mine, strict=True)) for theirs in others)

    return sorted((replace(trial, on_frontier=not beaten(trial)) for trial in trials), key=cost)


def plot_trials(trials: Sequence[Trial], path: Path) -> None:
    """Draw loss against size, the frontier filled, into a PNG or SVG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, trial in enumerate(trials, 1):
        face = "tab:blue" if trial.on_frontier else "none"
        label = f"{number}  {trial.recipe}: {trial.decode_tokens_per_s:,.0f} tokens/s"
        place = (trial.size_bytes / 1e6, trial.kl)
        axes.scatter(*place, s=60, facecolor=face, edgecolor="tab:blue", label=label)
        axes.annotate(str(number), place, (6, 4), textcoords="offset points", fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("bundle, MB")
    axes.set_ylabel("KL divergence from float32, nats a token")
    figure.legend(loc="outside right upper", fontsize=8, title="filled: no other is smaller, nearer and faster")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
