"""The commands that need the [export] extra: export, quantize and train. Import torch only when one of them runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import Check
from ortgpt.cli.report import agreement_lines, evidence_lines
from ortgpt.cli.streams import printable, write_line
from ortgpt.errors import OptionError
from ortgpt.ort.package import install_hint
from ortgpt_exporter.quantization.request import BITS, Quantization
from ortgpt_models.config import ACTIVATIONS
from ortgpt_models.errors import ModelError
from ortgpt_models.progress import Progress
from ortgpt_models.training_config import TrainingConfig

_EXTRA_OF = {
    **dict.fromkeys(
        ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "tokenizers", "huggingface_hub", "httpx2"), "export"
    ),
    "matplotlib": "plot",
    "optimum": "optimum",
    "peft": "lora",
}
_QUANTIZATION = tuple(field.name for field in dataclasses.fields(Quantization) if field.name != "dtype")


def _add_flags(command: Any, settings: Iterable[dataclasses.Field[Any]]) -> Any:
    """Add a flag for each setting that a dataclass declares."""
    for setting in reversed([*settings]):
        metadata = setting.metadata
        flag = metadata.get("flag") or f"--{setting.name.replace('_', '-')}"
        kind: Any = metadata.get("kind") or type(setting.default)
        if kind is str:
            kind = click.Choice(metadata["choices"])
        elif kind is Path:
            kind = click.Path(path_type=Path)
        values = {"is_flag": True} if kind is bool else {"type": kind, "default": setting.default}
        command = click.option(
            flag, setting.name, help=metadata["help"], show_default=setting.default is not None, **values
        )(command)
    return command


def _shared_options(command: Any) -> Any:
    """Add the options that export and quantize share."""
    for flag, help in (
        ("--force", "Replace an existing bundle, after the new one is complete."),
        ("--external-data", "Put even small weights of a portable graph into a file of their own."),
    ):
        command = click.option(flag, is_flag=True, help=help)(command)
    return _add_flags(command, [each for each in dataclasses.fields(Quantization) if each.name in _QUANTIZATION])


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
        with _bar("export") as bar:
            bundle = export_bundle(
                source,
                out,
                dtype=dtype,
                quantization=quantization,
                on_progress=lambda progress: _show(bar, progress),
                on_note=lambda note: _write_note(f"Note: {note}"),
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
        _sweep(bundle, eval_text, plot, _set_flags({"out": out, "dtype": dtype, **options}))
        return
    if plot is not None:
        raise click.UsageError("--plot would have no effect (accepted with --sweep)")
    if out is None or dtype is None:
        raise click.UsageError(f"Missing option '{'--dtype' if out else '--out'}' (or --sweep)")
    with one_line_errors():
        from ortgpt_exporter.quantize import quantize_bundle

        quantization = Quantization(dtype=dtype, **{name: options.pop(name) for name in _QUANTIZATION})
        with _bar("quantize") as bar:
            quantized = quantize_bundle(
                bundle, out, quantization, on_progress=lambda progress: _show(bar, progress), **options
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

        with _bar("sweep") as bar:
            trials = sweep_bundle(bundle, eval_text=eval_text, on_progress=lambda progress: _show(bar, progress))
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
    flags = _set_flags(options)
    if flags:
        raise OptionError(f"{', '.join(flags)} would have no effect (accepted with --dtype int8 or int4)")
    return None


def _set_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of the options that the command line set."""
    names = [name for name, value in options.items() if value is not None and value is not False]
    return ["--eval" if name == "eval_text" else f"--{name.replace('_', '-')}" for name in names]


def _show(bar: Any, progress: Progress) -> None:
    bar.length = progress.total
    bar.label = progress.activity
    bar.update(progress.done - bar.pos)


def _write_note(note: str) -> None:
    """Write a line to stderr, above the progress bar if one is visible."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    click.echo(clear + printable(note), err=True)


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


@click.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The checkpoint folder to write.")
@click.option("--held-out", type=click.Path(path_type=Path), help="Text to measure on. [default: the last 5% of TEXT]")
@lambda command: _add_flags(command, dataclasses.fields(TrainingConfig))
def train(texts: tuple[Path, ...], out: Path, held_out: Path | None, **options: Any) -> None:
    """Train a small GPT-2 from scratch on UTF-8 text files, into a Hugging Face folder.

    After an interruption, the same command continues from the last saved state (in OUT.training).
    """
    with one_line_errors():
        from ortgpt_models.train import train as train_checkpoint

        config = TrainingConfig(**options)
        with _bar("train") as bar:
            bits = train_checkpoint(
                texts,
                out,
                config=config,
                held_out=held_out,
                on_progress=lambda progress: _show(bar, progress),
                on_note=_write_note,
            )
    click.echo(f"{out}  held out {bits:.4f} bits per byte", err=True)


def format_checks(checks: Iterable[Check]) -> str:
    """Return the verification in a manifest as a table."""
    lines = [f"{'compared with PyTorch':<32}{'max abs diff':>14}{'accepted':>10}{'same winner':>14}"]
    for check in checks:
        same = f"{check.argmax_compared - check.argmax_differing}/{check.argmax_compared}"
        lines.append(f"{check.name:<32}{check.max_abs_diff:>14.1e}{check.tolerance:>10.1e}{same:>14}")
    return "\n".join(lines)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn ModelError into one line, and a missing extra into the command that installs it.

    SIGTERM and SIGHUP unwind like Ctrl-C, so that unfinished files are removed.
    """
    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # no SIGHUP on Windows
    main = threading.current_thread() is threading.main_thread()
    # A signal that is ignored, as nohup does with SIGHUP, stays ignored.
    before = {end: signal.signal(end, _end) for end in ends if main and signal.getsignal(end) is not signal.SIG_IGN}
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF.get(package)
        if extra is None:
            raise
        # Optimum pins an old transformers.
        place = ", in an environment of its own" if extra == "optimum" else ""
        extras = [extra] if importlib.util.find_spec("onnxruntime") else ["cpu", extra]
        raise click.ClickException(
            f"this command needs {package}, which is not installed; {install_hint(*extras)}{place}"
        ) from error
    except ModelError as error:
        raise click.ClickException(printable(str(error), kept="\n")) from error
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _bar(label: str) -> Any:
    """Return a progress bar on stderr, hidden unless that is a terminal."""
    return click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty(), show_eta=True)
