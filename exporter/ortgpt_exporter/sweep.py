"""Try the recipes of quantisation on one bundle, and say what each costs and brings. Writes nothing but the plot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ortgpt
from ortgpt.bundle import Bundle, open_bundle
from ortgpt.contract import DType, Target
from ortgpt.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evidence import compare, measure_speed
from ortgpt_exporter.quantized_bundle import Quantization, recipe_for
from ortgpt_exporter.quantized_files import check_source, open_quantized, write_quantized
from ortgpt_exporter.recipe import W8A8, Recipe
from ortgpt_exporter.steps import OnProgress, Steps
from ortgpt_exporter.texts import read_text, rows_to_measure

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
    given = None if eval_text is None else read_text(Tokenizer.load(source.path), eval_text, least=1)
    trials = []
    with ortgpt.load(source.path, device=Target.CPU) as generator, tempfile.TemporaryDirectory() as folder:
        rows = rows_to_measure(generator, given).rows
        fitting = dict.fromkeys(_fitting(source, RECIPES if recipes is None else recipes))
        steps = Steps(on_progress, len(fitting))
        for recipe in fitting:
            steps.next(recipe.shown)
            write_quantized(source, Path(folder), recipe)
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


def _fitting(source: Bundle, recipes: Sequence[Quantization]) -> Iterator[Recipe]:
    for asked in recipes:
        try:
            yield recipe_for(source, asked)
        except ExportError:  # this block size or method does not fit these matrices
            if asked.block_size is None and asked.method is None:
                raise


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
