"""The command `ortgpt`: the answer on stdout, everything else on stderr.

Only the folder `cli` writes to the terminal. Commands that need more than the runtime join through the entry-point
group `ortgpt.commands`, and are loaded when called.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from ortgpt import __version__
from ortgpt.bundle.folder import open_bundle
from ortgpt.cli.id_text import as_prompt
from ortgpt.cli.options import device_options, flag_mention, json_option, prefill_option
from ortgpt.cli.report import diagnosis_lines, info_lines, info_values
from ortgpt.cli.streams import json_text, printable, read_text, write_line
from ortgpt.errors import OptionError, OrtGptError
from ortgpt.loading import load
from ortgpt.tools.seal import seal_bundle

_COMMANDS_GROUP = "ortgpt.commands"


def _chat() -> click.Command:
    from ortgpt.cli.text import chat

    return chat


def _classify() -> click.Command:
    from ortgpt.cli.classify import classify

    return classify


def _eval() -> click.Command:
    from ortgpt.cli.evaluate import evaluate

    return evaluate


def _generate() -> click.Command:
    from ortgpt.cli.text import generate

    return generate


def _task() -> click.Command:
    from ortgpt.cli.task import task

    return task


# Commands with modules of their own, which are imported when they are called: each start pays for one alone. They are
# functions with imports, since PyInstaller finds those.
_COMMANDS = {"chat": _chat, "classify": _classify, "eval": _eval, "generate": _generate, "task": _task}


class _Main(click.Group):
    """Adds the entry-point commands, and turns errors that input can cause into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS, *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS:
            return _COMMANDS[cmd_name]()
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
            raise click.ClickException("standard output is closed; redirect it to /dev/null if you do not need it")
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            hint = _hint_at_dashes(error)
            if not hint:
                raise
            raise click.UsageError(f"{error.message} {hint}", error.ctx) from None
        except OptionError as error:
            raise click.UsageError(printable(error.worded(flag_mention), kept="\n")) from error
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
    """Turn GPT-2 and GPT-1 checkpoints into ONNX bundles, and generate text from them without PyTorch."""


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("text_file", metavar="[FILE]", default="-")
@click.option("--stride", type=int, metavar="N", help="Move windows by N tokens. [default: half the context]")
@click.option("--logprobs", is_flag=True, help="With --json: each token's id and log-probability, too.")
@json_option
@prefill_option
@device_options
def score(
    bundle: Path, text_file: str, stride: int | None, logprobs: bool, as_json: bool, prefill: str, device: str,
    threads: int | None,
) -> None:  # fmt: skip
    """Measure how well the model in BUNDLE predicts the text in FILE, or on standard input.

    If BUNDLE has no tokenizer, the text is token ids separated by white space, and there are no bits per byte.
    """
    if logprobs and not as_json:
        raise OptionError("--logprobs would have no effect without --json")
    text = read_text(text_file)
    with load(bundle, device=device, threads=threads, prefill=prefill) as generator:
        result = generator.score(as_prompt(generator, text), stride=stride)
    values: dict[str, Any] = {
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte if result.text_bytes else None,
        "nll": result.nll,
        "tokens": result.tokens,
    }
    if as_json:
        if logprobs:
            values |= {"token_ids": result.token_ids, "token_logprobs": result.token_logprobs}
        write_line(json_text(values))
    else:
        for name, value in values.items():
            if value is None:
                continue
            write_line(f"{name:<14} {value:,}" if name == "tokens" else f"{name:<14} {value:,.4f}")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
def info(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE is: model, precision, source, files, and how it was verified."""
    opened = open_bundle(bundle)
    for line in [json_text(info_values(opened))] if as_json else info_lines(opened):
        write_line(line)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@json_option
@device_options
def bench(bundle: Path, as_json: bool, device: str, threads: int | None) -> None:
    """Measure BUNDLE on this machine: speed, start, memory, and where the time goes. Takes up to a minute."""
    from ortgpt.tools.bench import bench_bundle, bench_lines

    measured = bench_bundle(bundle, device=device, threads=threads)
    for line in [json_text(dataclasses.asdict(measured))] if as_json else bench_lines(measured):
        write_line(line)


@main.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show what this machine and environment offer, and test ortgpt on them; exit code 1 if something is wrong."""
    from ortgpt.tools.doctor import diagnose

    diagnosis = diagnose()
    for line in [json_text(dataclasses.asdict(diagnosis))] if as_json else diagnosis_lines(diagnosis):
        write_line(line)
    if diagnosis.faults:
        sys.exit(1)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
def seal(bundle: Path) -> None:
    """Write the new hash of BUNDLE's generation_config.json into its manifest after an edit by hand."""
    changed = seal_bundle(bundle)
    click.echo(f"{bundle}: {', '.join(changed) or 'nothing'} changed", err=True)


def _hint_at_dashes(error: click.NoSuchOption) -> str:
    """Return how to give an argument that begins with a dash; nothing if what was given looks like a misspelt flag."""
    if error.ctx is None or re.fullmatch(r"--[\w-]+", error.option_name):
        return ""
    options, *arguments = error.ctx.command.collect_usage_pieces(error.ctx)
    if not arguments:
        return ""
    usage = " ".join([error.ctx.command_path, options, *arguments[:-1], "--", *arguments[-1:]])
    return f"An argument that begins with - goes last, after --: {usage}"


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return the commands that joined, except those of packages that are not here: a frozen app may leave them out."""
    points = importlib.metadata.entry_points(group=_COMMANDS_GROUP)
    return [point for point in points if importlib.util.find_spec(point.module.partition(".")[0])]
