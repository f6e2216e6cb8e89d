"""The command finetune, which needs the [export] extra. Imports torch only when it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from ortgpt.contract import FINE_TUNINGS, DType
from ortgpt_exporter.cli.terminal import add_flags, one_line_errors, progress_bar, show_progress, write_note
from ortgpt_exporter.quantization.request import BITS
from ortgpt_models.finetune_config import FineTuneConfig


@click.command()
@click.argument("task", type=click.Choice(FINE_TUNINGS))
@click.argument("data", type=click.Path(path_type=Path), metavar="DATA.jsonl")
@click.option(
    "--from",
    "checkpoint",
    required=True,
    metavar="CHECKPOINT",
    help="The language model: a Hugging Face folder, a hub id, a nanoGPT ckpt.pt, or austen.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option(
    "--tokenizer", metavar="PATH|ID", help="Where the tokenizer is. [default: CHECKPOINT, unless it is a file]"
)
@click.option("--held-out", type=click.Path(path_type=Path), help="Rows to measure on. [default: a share of DATA]")
@click.option(
    "--dtype",
    type=click.Choice([DType.FLOAT32, DType.FLOAT16, *BITS]),
    default=DType.FLOAT32,
    show_default=True,
    help="Precision of the bundle, as of export.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the losses, as PNG or SVG.")
@lambda command: add_flags(command, dataclasses.fields(FineTuneConfig))
def finetune(
    task: str, data: Path, checkpoint: str, out: Path, tokenizer: str | None, held_out: Path | None, dtype: str,
    plot: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Fine-tune a language model for TASK on the rows of DATA.jsonl, and export the result, in one folder.

    Each line is a JSON object with "label" and, for classification, "text"; for entailment and similarity, "text" and
    "text_pair"; for multiple-choice, it has "context", "choices" and "answer". Labels that are numbers with a fraction
    make a regression. OUT gets a checkpoint that `transformers` opens, a bundle for `ortgpt classify`, losses.json and
    training.json. After an interruption, the same command continues from the last saved state (in OUT.training).
    """
    is_place = plot is None or (plot.absolute().parent.is_dir() and not plot.is_dir())
    if plot is not None and not (is_place and plot.suffix in (".png", ".svg")):
        raise click.UsageError(f"--plot {plot} (accepted: a file in an existing folder that ends in .png or .svg)")
    with one_line_errors():
        config = FineTuneConfig(**options)
        if plot is not None:
            import matplotlib  # noqa: F401  # to fail before the work, not after it
        from ortgpt_exporter.checkpoint.load import CheckpointSource
        from ortgpt_exporter.finetune import BUNDLE, finetune_checkpoint

        with progress_bar("finetune") as bar:
            done = finetune_checkpoint(
                task,
                data,
                CheckpointSource(checkpoint, tokenizer=tokenizer),
                out,
                config=config,
                held_out=held_out,
                dtype=dtype,
                plot=plot,
                on_progress=lambda progress: show_progress(bar, progress),
                on_note=write_note,
            )
    metric, baseline, count = done.result.losses.best.metric, done.data.baseline, len(done.data.held_out)
    if done.data.has_classes:
        said = f"accuracy {metric:.1%} on {count:,} held-out rows (the most frequent answer: {baseline:.1%})"
    else:
        said = f"mean absolute error {metric:.4f} on {count:,} held-out rows (of the mean: {baseline:.4f})"
    click.echo(f"{out / BUNDLE}  {said}", err=True)
