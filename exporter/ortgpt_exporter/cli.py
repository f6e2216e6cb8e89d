"""The commands that need the [export] extra: export, quantize and train. Imports torch only when one of them runs."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import Check
from ortgpt.cli.report import evidence_lines
from ortgpt.cli.streams import printable, write_line
from ortgpt.errors import OptionError
from ortgpt_exporter.quantization.recipe import ALL_METHODS

if TYPE_CHECKING:
    from ortgpt_exporter.progress import Progress as ExportProgress
    from ortgpt_models.train import Progress as TrainProgress

_QUANTIZATION = (
    "method",
    "block_size",
    "head_dtype",
    "fast_prefill",
    "calibration",
    "eval_text",
    "max_perplexity_ratio",
    "max_kl",
)
_EXTRA_MODULES = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "httpx2",
    "matplotlib",
    "optimum",
)
_EXTRAS = {
    "matplotlib": "`pip install 'ortgpt[plot]'`",
    "optimum": "`pip install 'ortgpt[cpu,optimum]'` in an environment of its own",
}


def _quantization_options(command: Any) -> Any:
    """Add the options of quantisation, which export and quantize share."""
    options = (
        click.option(
            "--method",
            type=click.Choice(ALL_METHODS),
            help="How weights are rounded. w8a8 (int8): one scale a row of activations, for faster prefill. "
            "dynamic-…: Optimum's, portable int8 only. [default: scale-search; portable int8: w8a8]",
        ),
        click.option(
            "--block-size",
            type=int,
            help="Weights that share a scale: 128, 64, 32 or 16. [default: 128; embedding and head: int8 64, int4 32]",
        ),
        click.option(
            "--head-dtype",
            type=click.Choice(["int8", "int4"]),
            help="Precision of embedding and head. [default: as the rest]",
        ),
        click.option(
            "--fast-prefill",
            is_flag=True,
            help="Add a graph for prompts, native only: twice as fast there; it is opened, and takes memory, with the "
            "first prompt of 32 tokens. int4: and a byte a weight on disk.",
        ),
        click.option(
            "--calibration", type=click.Path(path_type=Path), help="The text that the method gptq reads, UTF-8."
        ),
        click.option(
            "--eval",
            "eval_text",
            type=click.Path(path_type=Path),
            help="Measure on this text. [default: 2,048 tokens drawn from the float32 model]",
        ),
        click.option(
            "--max-perplexity-ratio",
            type=float,
            help="Write nothing above this ratio to float32. [default: int8 1.01, int4 1.05]",
        ),
        click.option("--max-kl", type=float, help="Write nothing above this mean KL divergence, in nats."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("checkpoint")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The bundle folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "int8", "int4"]),
    help="float32 or float16: of weights, activations and cache; int8 or int4: of weights. [default: float32 for cpu, "
    "float16 for cuda]",
)
@click.option(
    "--flavour",
    type=click.Choice(["native", "portable"]),
    default="native",
    show_default=True,
    help="native: fused attention on a fixed cache, the fastest here. portable: standard operators, for Optimum, "
    "onnxruntime-genai and Transformers.js.",
)
@click.option(
    "--target",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="The device to run on; cuda is native and float16.",
)
@click.option("--tokenizer", metavar="PATH|ID", help="Take the tokenizer from this folder or hub id; nanoGPT has none.")
@click.option("--adapter", metavar="DIR|ID", help="Merge this PEFT LoRA adapter into the weights.")
@click.option("--revision", help="Branch, tag or commit of the hub id. [default: main]")
@click.option(
    "--activation",
    type=click.Choice(["gelu", "gelu_new"]),
    help="Of a nanoGPT file, which does not state it: gelu, or gelu_new where it was trained before mid-2023.",
)
@click.option("--external-data", is_flag=True, help="Put small weights of a portable graph, too, into their own file.")
@_quantization_options
@click.option("--force", is_flag=True, help="Replace the bundle that is already there, once the new one is whole.")
def export(checkpoint: str, out: Path, dtype: str | None, force: bool, **form: Any) -> None:
    """Export CHECKPOINT to a bundle and prove it against PyTorch.

    CHECKPOINT is a Hugging Face GPT-2 folder, a hub id (openai-community/gpt2), a nanoGPT ckpt.pt, or `austen`, the
    model that comes with this package.
    """
    with one_line_errors():
        from ortgpt_exporter.export import export_bundle

        asked = {name: form.pop(name) for name in _QUANTIZATION}
        notes: list[str] = []
        with _bar("export") as bar:
            bundle = export_bundle(
                checkpoint, out, dtype=dtype, quantization=_quantization(dtype, asked), force=force,
                on_progress=lambda progress: _show(bar, progress), on_note=notes.append, **form,
            )  # fmt: skip
    for note in notes:
        click.echo(printable(f"Note: {note}"), err=True)
    _tell(bundle, out)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The bundle folder to write.")
@click.option("--dtype", type=click.Choice(["int8", "int4"]), help="Precision of the weights.")
@_quantization_options
@click.option("--external-data", is_flag=True, help="Put small weights of a portable graph, too, into their own file.")
@click.option("--force", is_flag=True, help="Replace the bundle that is already there, once the new one is whole.")
@click.option("--sweep", is_flag=True, help="Write no bundle: try the recipes, and show what each costs and brings.")
@click.option("--plot", type=click.Path(path_type=Path), help="With --sweep: draw it, as PNG or SVG.")
def quantize(
    bundle: Path, out: Path | None, dtype: str | None, external_data: bool, force: bool, sweep: bool,
    plot: Path | None, **asked: Any,
) -> None:  # fmt: skip
    """Quantise the float32 BUNDLE, and measure what it costs; a bundle that fails its gate is not written."""
    if sweep:
        eval_text = asked.pop("eval_text")
        given: list[tuple[str, Any]] = [("--out", out), ("--dtype", dtype), ("--external-data", external_data or None)]
        given += [("--force", force or None), *_flags(asked)]
        _sweep(bundle, eval_text, plot, [flag for flag, value in given if value is not None and value is not False])
        return
    if plot is not None:
        raise click.UsageError("--plot would have no effect (accepted with --sweep)")
    if out is None or dtype is None:
        raise click.UsageError(f"Missing option '{'--dtype' if out else '--out'}' (or --sweep)")
    with one_line_errors():
        from ortgpt_exporter.quantization.request import Quantization
        from ortgpt_exporter.quantize import quantize_bundle

        with _bar("quantize") as bar:
            made = quantize_bundle(
                bundle, out, Quantization(dtype=dtype, **asked), external_data=external_data, force=force,
                on_progress=lambda progress: _show(bar, progress),
            )  # fmt: skip
    _tell(made, out)


def _sweep(bundle: Path, eval_text: Path | None, plot: Path | None, given: list[str]) -> None:
    """Try the recipes and write the table. Raises UsageError for options that would have no effect."""
    if given:
        raise click.UsageError(f"{', '.join(given)} would have no effect (accepted with --sweep: --eval, --plot)")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise click.UsageError(f"--plot {plot}: the folder {plot.absolute().parent} does not exist")
    if plot is not None and plot.is_dir():
        raise click.UsageError(f"--plot {plot} is a folder (accepted: a name that ends in .png or .svg)")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise click.UsageError(f"--plot {plot} (accepted: a name that ends in .png or .svg)")
    with one_line_errors():
        from ortgpt_exporter.sweep import plot_trials, sweep_bundle

        if plot is not None:
            import matplotlib  # noqa: F401  # to fail before the work, not after it

        with _bar("sweep") as bar:
            trials = sweep_bundle(bundle, eval_text=eval_text, on_progress=lambda progress: _show(bar, progress))
        write_line(f"  {'quantised to':<56}{'MB':>8}{'ppl ratio':>11}{'KL':>10}{'prefill/s':>11}{'decode/s':>10}")
        for trial in trials:
            write_line(
                f"{'*' if trial.on_frontier else ' '} {trial.recipe:<56}{trial.size_bytes / 1e6:>8.1f}"
                f"{trial.perplexity_ratio:>11.4f}{trial.kl:>10.5f}{trial.prefill_tokens_per_s:>11,.0f}"
                f"{trial.decode_tokens_per_s:>10,.0f}"
            )
        if plot is not None:
            plot_trials(trials, plot)
    click.echo("* no other is as small, as near to float32 and as fast in decoding", err=True)


def _quantization(dtype: str | None, asked: dict[str, Any]) -> Any:
    """Return the quantisation that export is to do, if any. Raises OptionError for its options without it."""
    from ortgpt_exporter.quantization.request import Quantization

    if dtype in ("int8", "int4"):
        return Quantization(dtype=dtype, **asked)
    given = [flag for flag, value in _flags(asked) if value is not None and value is not False]
    if given:
        raise OptionError(f"{', '.join(given)} would have no effect (accepted with --dtype int8 or int4)")
    return None


def _flags(options: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("--eval" if name == "eval_text" else f"--{name.replace('_', '-')}", v) for name, v in options.items()]


def _show(bar: Any, progress: ExportProgress) -> None:
    bar.length = progress.total
    bar.label = progress.activity
    bar.update(progress.done - bar.pos)


def _tell(bundle: Bundle, out: Path) -> None:
    """Write what was proven of a new bundle, and its size."""
    manifest = bundle.manifest
    if manifest.verification:
        click.echo(format_checks(manifest.verification), err=True)
    if manifest.evidence is not None:
        click.echo("\n".join(evidence_lines(manifest.evidence)), err=True)
    size = sum(entry.size for entry in manifest.files.values())
    click.echo(f"{out}  {size / 1e6:.1f} MB  {manifest.precision.dtype}  {bundle.config.n_layer} layers", err=True)


@click.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The checkpoint folder to write.")
@click.option("--held-out", type=click.Path(path_type=Path), help="Text to measure on; by default the last 5% of TEXT.")
@click.option("--n-layer", type=int, default=6, show_default=True, help="Layers.")
@click.option("--n-head", type=int, default=4, show_default=True, help="Attention heads a layer.")
@click.option("--n-embd", type=int, default=256, show_default=True, help="Width, a multiple of --n-head.")
@click.option("--n-positions", type=int, default=256, show_default=True, help="Context in tokens.")
@click.option("--vocab-size", type=int, default=4096, show_default=True, help="Tokens of the byte-level BPE.")
@click.option("--dropout", type=float, default=0.1, show_default=True, help="On embeddings and residual branches.")
@click.option("--steps", type=int, default=2000, show_default=True, help="Optimiser steps.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Contexts a step.")
@click.option("--learning-rate", type=float, default=1.5e-3, show_default=True, help="Peak, after the warm-up.")
@click.option("--warmup-steps", type=int, default=100, show_default=True, help="Steps of linear warm-up.")
@click.option("--weight-decay", type=float, default=0.1, show_default=True, help="On weight matrices.")
@click.option("--clip-norm", type=float, default=1.0, show_default=True, help="Largest norm of the gradient.")
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes every random choice.")
@click.option("--bfloat16", is_flag=True, help="Multiply in bfloat16: faster on CPUs that have it.")
@click.option("--evaluate-every", type=int, default=250, show_default=True, help="Steps between held-out measurements.")
@click.option("--save-every", type=int, default=100, show_default=True, help="Steps between saved states.")
def train(texts: tuple[Path, ...], out: Path, held_out: Path | None, **recipe: Any) -> None:
    """Train a small GPT-2 from scratch on UTF-8 text files, into a Hugging Face folder.

    Interrupted, the same command goes on from the last saved state (in OUT.training).
    """
    with one_line_errors():
        from ortgpt_models.train import Recipe
        from ortgpt_models.train import train as run

        made = Recipe(**recipe)
        with _bar("train") as bar:
            bar.length = made.steps

            def show(progress: TrainProgress) -> None:
                if progress.held_out is not None:
                    click.echo(
                        f"{_clear()}step {progress.step}: held out {progress.held_out:.4f} bits per byte", err=True
                    )
                bar.label = f"loss {progress.loss:.3f}"
                bar.update(progress.step - bar.pos)

            bits = run(
                texts, out, recipe=made, held_out=held_out, on_progress=show,
                on_note=lambda note: click.echo(note, err=True),
            )  # fmt: skip
    click.echo(f"{out}  held out {bits:.4f} bits per byte", err=True)


def format_checks(checks: Iterable[Check]) -> str:
    """Return the verification of a manifest as a table."""
    lines = [f"{'compared with PyTorch':<32}{'max abs diff':>14}{'accepted':>10}{'same winner':>14}"]
    for check in checks:
        same = f"{check.argmax_compared - check.argmax_differing}/{check.argmax_compared}"
        lines.append(f"{check.name:<32}{check.max_abs_diff:>14.1e}{check.tolerance:>10.1e}{same:>14}")
    return "\n".join(lines)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors that bad input raises into one line; a missing extra into the command that brings it.

    A request to end, or the end of the terminal, unwinds like Ctrl-C, so that nothing half-written stays.
    """
    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # no SIGHUP on Windows
    main = threading.current_thread() is threading.main_thread()
    # One that is ignored stays so: nohup does that.
    before = {end: signal.signal(end, _end) for end in ends if main and signal.getsignal(end) is not signal.SIG_IGN}
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA_MODULES:
            raise
        extra = _EXTRAS.get(error.name.partition(".")[0], "`pip install 'ortgpt[cpu,export]'`")
        raise click.ClickException(f"this command needs {error.name}, which is not installed; run {extra}") from error
    except ValueError as error:
        if type(error).__name__ != "ModelError":  # cannot be imported without torch
            raise
        raise click.ClickException(printable(str(error), kept="\n")) from error
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _clear() -> str:
    """Return what takes the cursor back over the progress bar, where one is shown."""
    return "\r\033[K" if sys.stderr.isatty() else ""


def _bar(label: str) -> Any:
    """Return a progress bar on stderr, which shows nothing unless that is a terminal."""
    return click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty(), show_eta=True)
