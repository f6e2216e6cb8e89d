"""The commands that need the [export] extra: export, quantize and train. Import torch only when one of them runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import Check
from ortgpt.cli.report import agreement_lines, evidence_lines
from ortgpt.cli.streams import write_line
from ortgpt.errors import OptionError
from ortgpt_exporter.cli.finetune_command import finetune
from ortgpt_exporter.cli.terminal import (
    add_flags,
    one_line_errors,
    progress_bar,
    set_flags,
    show_progress,
    write_note,
)
from ortgpt_exporter.cli.train_command import train
from ortgpt_exporter.quantization.request import BITS, Quantization
from ortgpt_models.config import ACTIVATIONS

__all__ = ["export", "finetune", "one_line_errors", "quantize", "train"]
_QUANTIZATION = tuple(field.name for field in dataclasses.fields(Quantization) if field.name != "dtype")


def _shared_options(command: Any) -> Any:
    """Add the options that export and quantize share."""
    for flag, help in (
        ("--force", "Replace an existing bundle, after the new one is complete."),
        ("--external-data", "Put even small weights of a portable graph into a file of their own."),
    ):
        command = click.option(flag, is_flag=True, help=help)(command)
    return add_flags(command, [each for each in dataclasses.fields(Quantization) if each.name in _QUANTIZATION])


@click.command()
@click.argument("checkpoint")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The bundle folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", *BITS]),
    help="float32 or float16: weights, activations and cache. int8 or int4: weights. "
    "[default: float32 for cpu, float16 for cuda]",
)
@click.option(
    "--flavour",
    type=click.Choice(["native", "portable"]),
    default="native",
    show_default=True,
    help="native: fused attention on a fixed cache, the fastest in ortgpt. portable: standard operators, for Optimum, "
    "onnxruntime-genai and Transformers.js.",
)
@click.option(
    "--target",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="The device to run on; cuda needs native and float16.",
)
@click.option(
    "--tokenizer",
    metavar="PATH|ID",
    help="Folder, tokenizer.json or hub id to take the tokenizer from; none for a bundle of token ids. "
    "[default: CHECKPOINT, unless it is a file]",
)
@click.option("--adapter", metavar="PATH|ID", help="Folder or hub id of a PEFT adapter to merge into the weights.")
@click.option("--revision", help="Branch, tag or commit of the hub id. [default: main]")
@click.option(
    "--activation",
    metavar="NAME",
    type=click.Choice(ACTIVATIONS),
    help="Activation of a nanoGPT file, which does not state it, by its name in `transformers`; gelu_new if it was "
    "trained before mid-2023. [default: gelu]",
)
@click.option("--bos-token-id", type=int, metavar="ID", help="Token that begins a text. [default: CHECKPOINT's]")
@click.option(
    "--eos-token-id",
    type=int,
    metavar="ID",
    multiple=True,
    help="Token that ends a text; repeat it for several. [default: CHECKPOINT's]",
)
@_shared_options
def export(
    checkpoint: str,
    out: Path,
    dtype: str | None,
    eos_token_id: tuple[int, ...],
    **options: Any,
) -> None:
    """Export CHECKPOINT to a bundle, and compare the bundle with PyTorch.

    CHECKPOINT is a Hugging Face folder of GPT-2 or GPT-1, a hub id (openai-community/gpt2), a nanoGPT ckpt.pt, or, in
    a clone of this project, `austen`.
    """
    with one_line_errors():
        from ortgpt_exporter.checkpoint.load import CheckpointSource
        from ortgpt_exporter.export import export_bundle

        names = ("tokenizer", "adapter", "revision", "activation", "bos_token_id")
        source = CheckpointSource(
            checkpoint, eos_token_id=eos_token_id or None, **{name: options.pop(name) for name in names}
        )
        quantization = _quantization(dtype, {name: options.pop(name) for name in _QUANTIZATION})
        with progress_bar("export") as bar:
            bundle = export_bundle(
                source,
                out,
                dtype=dtype,
                quantization=quantization,
                on_progress=lambda progress: show_progress(bar, progress),
                on_note=lambda note: write_note(f"Note: {note}"),
                **options,
            )
    _write_summary(bundle, out)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The bundle folder to write.")
@click.option("--dtype", type=click.Choice(list(BITS)), help="Precision of the weights.")
@_shared_options
@click.option("--sweep", is_flag=True, help="Write no bundle: try several recipes, and compare size, loss and speed.")
@click.option("--plot", type=click.Path(path_type=Path), help="With --sweep: draw the comparison, as PNG or SVG.")
def quantize(bundle: Path, out: Path | None, dtype: str | None, sweep: bool, plot: Path | None, **options: Any) -> None:
    """Quantise the float32 BUNDLE, and measure the loss; a bundle that loses more than accepted is not written."""
    if sweep:
        eval_text = options.pop("eval_text")
        _sweep(bundle, eval_text, plot, set_flags({"out": out, "dtype": dtype, **options}))
        return
    if plot is not None:
        raise click.UsageError("--plot would have no effect (accepted with --sweep)")
    if out is None or dtype is None:
        raise click.UsageError(f"Missing option '{'--dtype' if out else '--out'}' (or --sweep)")
    with one_line_errors():
        from ortgpt_exporter.quantize import quantize_bundle

        quantization = Quantization(dtype=dtype, **{name: options.pop(name) for name in _QUANTIZATION})
        with progress_bar("quantize") as bar:
            quantized = quantize_bundle(
                bundle, out, quantization, on_progress=lambda progress: show_progress(bar, progress), **options
            )
    _write_summary(quantized, out)


def _sweep(bundle: Path, eval_text: Path | None, plot: Path | None, other_flags: list[str]) -> None:
    """Try the recipes and write the table. Raises UsageError for options that would have no effect."""
    if other_flags:
        raise click.UsageError(f"{', '.join(other_flags)} would have no effect (accepted with --sweep: --eval, --plot)")
    is_place = plot is None or (plot.absolute().parent.is_dir() and not plot.is_dir())
    if plot is not None and not (is_place and plot.suffix in (".png", ".svg")):
        raise click.UsageError(f"--plot {plot} (accepted: a file in an existing folder that ends in .png or .svg)")
    with one_line_errors():
        from ortgpt_exporter.sweep import plot_trials, sweep_bundle

        if plot is not None:
            import matplotlib  # noqa: F401  # to fail before the work, not after it

        with progress_bar("sweep") as bar:
            trials = sweep_bundle(
                bundle, eval_text=eval_text, on_progress=lambda progress: show_progress(bar, progress)
            )
        write_line(f"  {'quantised to':<56}{'MB':>8}{'ppl ratio':>11}{'KL':>10}{'prefill/s':>11}{'decode/s':>10}")
        for trial in trials:
            write_line(
                f"{'*' if trial.on_frontier else ' '} {trial.recipe:<56}{trial.size_bytes / 1e6:>8.1f}"
                f"{trial.divergence.perplexity_ratio:>11.4f}{trial.divergence.kl:>10.5f}"
                f"{trial.speed.prefill:>11,.0f}{trial.speed.decode:>10,.0f}"
            )
        if plot is not None:
            plot_trials(trials, plot)
    click.echo("* on the frontier: no other recipe is as small, as close to float32 and as fast in decoding", err=True)


def _quantization(dtype: str | None, options: Mapping[str, Any]) -> Quantization | None:
    """Return the quantisation of an export, or None for float32 and float16, with which its options are refused."""
    if dtype in BITS:
        return Quantization(dtype=dtype, **options)
    flags = set_flags(options)
    if flags:
        raise OptionError(f"{', '.join(flags)} would have no effect (accepted with --dtype int8 or int4)")
    return None


def _write_summary(bundle: Bundle, out: Path) -> None:
    """Write what was measured of a new bundle, and its size."""
    manifest = bundle.manifest
    if manifest.verification:
        click.echo(format_checks(manifest.verification), err=True)
    if manifest.evidence is not None:
        click.echo("\n".join(evidence_lines(manifest.evidence)), err=True)
    if manifest.agreement is not None:
        click.echo("\n".join(agreement_lines(manifest.agreement)), err=True)
    size = sum(entry.size for entry in manifest.files.values())
    click.echo(f"{out}  {size / 1e6:.1f} MB  {manifest.precision.dtype}  {bundle.config.n_layer} layers", err=True)


def format_checks(checks: Iterable[Check]) -> str:
    """Return the verification in a manifest as a table."""
    lines = [f"{'compared with PyTorch':<32}{'max abs diff':>14}{'accepted':>10}{'same winner':>14}"]
    for check in checks:
        same = f"{check.argmax_compared - check.argmax_differing}/{check.argmax_compared}"
        lines.append(f"{check.name:<32}{check.max_abs_diff:>14.1e}{check.tolerance:>10.1e}{same:>14}")
    return "\n".join(lines)
