"""The command line of the runtime: the answer on stdout, everything else on stderr.

Only modules whose names begin with `cli` write to the terminal. Commands that need more than the runtime join through
the entry-point group `ortgpt.commands`, loaded when called.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ortgpt import __version__
from ortgpt.bundle import open_bundle
from ortgpt.cli_io import printable, read_text, write_line
from ortgpt.cli_options import with_flags
from ortgpt.cli_text import chat, generate
from ortgpt.contract import Key
from ortgpt.errors import OptionError, OrtGptError
from ortgpt.generator import load
from ortgpt.manifest import Evidence, describe_graph
from ortgpt.sealing import seal_bundle

_COMMANDS_GROUP = "ortgpt.commands"


class _Main(click.Group):
    """Adds the entry-point commands, and turns errors that input can cause into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        for point in _entry_points():
            if point.name == cmd_name:
                loaded: click.Command = point.load()
                return loaded
        return None

    def invoke(self, ctx: click.Context) -> Any:
        if sys.stderr is None:
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for as long as the process lives
        if sys.stdout is None:
            raise click.ClickException("standard output is closed; lead it to /dev/null where it is not wanted")
        try:
            return super().invoke(ctx)
        except OptionError as error:
            raise click.UsageError(printable(with_flags(str(error)), kept="\n")) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            raise
        except OrtGptError as error:
            raise click.ClickException(printable(str(error), kept="\n")) from error
        except OSError as error:
            named = error.filename is not None and error.strerror
            message = f"{error.filename}: {error.strerror}" if named else str(error)
            raise click.ClickException(printable(message)) from error


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ortgpt")
def main() -> None:
    """GPT-2 in PyTorch to ONNX bundles, and text from them without PyTorch."""


main.add_command(generate)
main.add_command(chat)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("text_file", metavar="[FILE]", default="-")
@click.option("--stride", type=int, metavar="N", help="Move windows by N tokens. [default: half the context]")
@click.option("--logprobs", is_flag=True, help="With --json: each token's id and log-probability, too.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--threads", type=int, metavar="N", help="CPU threads. [default: the CPUs this process may use]")
def score(
    bundle: Path, text_file: str, stride: int | None, logprobs: bool, as_json: bool, device: str, threads: int | None
) -> None:
    """Measure how well the model in BUNDLE predicts the text in FILE, or on standard input."""
    if logprobs and not as_json:
        raise OptionError("--logprobs would have no effect without --json")
    text = read_text(text_file)
    with load(bundle, device=device, threads=threads) as generator:
        result = generator.score(text, stride=stride)
    values: dict[str, Any] = {
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "nll": result.nll,
        "tokens": result.tokens,
    }
    if as_json:
        if logprobs:
            values |= {"token_ids": result.token_ids, "token_logprobs": result.token_logprobs}
        write_line(json.dumps(values))
    else:
        for name, value in values.items():
            write_line(f"{name:<14} {value:,}" if name == "tokens" else f"{name:<14} {value:,.4f}")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def info(bundle: Path, as_json: bool) -> None:
    """Say what BUNDLE is: model, precision, source, files, and how it was verified."""
    record = open_bundle(bundle).info()
    if as_json:
        write_line(json.dumps(dataclasses.asdict(record)))
        return
    parameters = ", ".join(f"{key} {_shown(value)}" for key, value in record.precision.parameters.items())
    lines = {
        "bundle": record.path,
        "model": f"{record.n_layer} layers, {record.n_head} heads, context {record.n_positions:,}, "
        f"vocabulary {record.vocab_size:,} ({record.masked_tokens:,} masked)",
        "weights": f"{record.precision.dtype}, recipe {record.precision.recipe}{parameters and f' ({parameters})'}",
        "promises": _promise_text(record.precision.promise),
        "weights from": f"{record.source.id}, licence {record.source.licence or 'not stated'}",
        "weights sha256": record.source.sha256,
        "onnxruntime": f"{record.minimum_onnxruntime} or newer",
        "size in bytes": f"{record.size_bytes:,}",
    }
    lines |= {f"  {name}": f"{size:,}" for name, size in record.file_sizes_bytes.items()}
    for graph in record.graphs:
        lines[f"graph {graph.file}"] = describe_graph(graph)
    for check in record.verification:
        lines[f"verified: {check.name}"] = (
            f"logits within {check.max_abs_diff:.1e} of PyTorch (accepted {check.tolerance:.1e})"
        )
    width = max(map(len, lines)) + 2
    for name, value in lines.items():
        write_line(f"{name:<{width}}{value}")
    for line in [] if record.evidence is None else evidence_lines(record.evidence):
        write_line(line)


def evidence_lines(evidence: Evidence) -> list[str]:
    """Return the measurements of a quantised bundle as a table."""
    found, base = evidence, "float32"
    rows = [
        (f"on {found.tokens:,} tokens, {found.text}", "this", base, ""),
        ("perplexity", f"{found.perplexity:.3f}", f"{found.baseline_perplexity:.3f}", f"{found.perplexity_ratio:.4f}x"),
        ("bits per byte", f"{found.bits_per_byte:.4f}", f"{found.baseline_bits_per_byte:.4f}", ""),
        ("KL divergence, nats", f"{found.kl:.5f}", "", ""),
        ("same best token", f"{100 * found.top1:.1f}%", "", ""),
        ("same five best", f"{100 * found.top5:.1f}%", "", ""),
        ("bytes per parameter", f"{found.bytes_per_parameter:.3f}", "4.000", ""),
        *(
            (f"{what}, tokens/s", f"{this:,.0f}", f"{other:,.0f}", f"{this / other:.2f}x")
            for what, this, other in (
                ("prefill", found.prefill_tokens_per_s, found.baseline_prefill_tokens_per_s),
                ("decode", found.decode_tokens_per_s, found.baseline_decode_tokens_per_s),
            )
        ),
    ]
    matrices = ", ".join(f"{count} in {kind}" for kind, count in found.matrices.items())
    reasons: dict[str, list[str]] = {}
    for name, why in found.left_out.items():
        reasons.setdefault(why, []).append(name)
    left = "; ".join(f"{_some(names)} ({why})" for why, names in reasons.items()) or "none"
    return [
        *(f"{what:<48}{this:>10}{other:>10}{ratio:>10}".rstrip() for what, this, other, ratio in rows),
        f"matrices: {matrices}; left out: {left}",
        f"measured with {found.threads} threads, CPU with {' '.join(found.cpu_features) or 'unknown features'}",
    ]


def _promise_text(promise: Mapping[str, Any]) -> str:
    """Say what a precision promises of the same token computed otherwise than alone and one a step."""
    kind = str(promise.get(Key.KIND)).replace("_", " ")
    if Key.RELATIVE_LOGIT_BOUND in promise:
        return f"{kind}: a logit moves by at most {promise[Key.RELATIVE_LOGIT_BOUND]} of the largest"
    if Key.LOGIT_BOUND not in promise:
        return kind
    flips = {
        "in a batch": Key.BATCH_FLIPS,
        "beside a row of outliers": Key.OUTLIER_FLIPS,
        "in a whole prefill": Key.PIECE_FLIPS,
        "in steps of four": Key.STEP_FLIPS,
    }
    changed = ", ".join(f"{promise[key]:.1f} {where}" for where, key in flips.items() if key in promise)
    return f"{kind}: a logit moves by at most {promise[Key.LOGIT_BOUND]:.2g}; best tokens changed of 1,000: {changed}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return _some([str(each) for each in value]) or "none"
    return " ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _some(names: list[str]) -> str:
    """Return names with commas between; of many, two and how many more there are."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--threads", type=int, help="CPU threads. [default: the CPUs this process may use]")
def bench(bundle: Path, as_json: bool, device: str, threads: int | None) -> None:
    """Measure BUNDLE on this machine: speed, start, memory, and where the time goes. Takes up to a minute."""
    from ortgpt.bench import bench_bundle, bench_lines

    found = bench_bundle(bundle, device=device, threads=threads)
    for line in [json.dumps(dataclasses.asdict(found))] if as_json else bench_lines(found):
        write_line(line)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def doctor(as_json: bool) -> None:
    """Say what this machine and environment offer, and test ortgpt on them; exit code 1 where something is wrong."""
    from ortgpt.doctor import diagnose

    found = diagnose()
    values = dataclasses.asdict(found)
    if as_json:
        write_line(json.dumps(values))
    else:
        values |= {
            "packages": [f"{name} {version or 'absent'}" for name, version in found.packages.items()],
            "memory_bytes": _gib(found.memory_bytes),
            "memory_available_bytes": _gib(found.memory_available_bytes),
            "self_test_s": "not passed" if found.self_test_s is None else f"passed in {found.self_test_s:.2f} s",
        }
        del values["faults"]
        for name, value in values.items():
            label = name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
            write_line(f"{label:<22}{_known(value)}")
        for fault in found.faults:
            write_line(f"FAULT: {fault}")
    if found.faults:
        sys.exit(1)


def _gib(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def _known(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
def seal(bundle: Path) -> None:
    """State the new hash of BUNDLE's generation_config.json after an edit by hand."""
    changed = seal_bundle(bundle)
    click.echo(f"{bundle}: {', '.join(changed) or 'nothing'} changed", err=True)


def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=_COMMANDS_GROUP)
