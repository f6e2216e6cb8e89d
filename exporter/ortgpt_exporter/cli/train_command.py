"""The command `train`: a network from scratch, from a checkpoint, or a LoRA. Imports torch only when it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ortgpt.errors import OptionError
from ortgpt_exporter.adapter_settings import AdapterSettings
from ortgpt_exporter.cli.terminal import (
    add_flags,
    one_line_errors,
    progress_bar,
    set_flags,
    show_progress,
    write_note,
)
from ortgpt_models.config import ACTIVATIONS
from ortgpt_models.training_config import TrainingConfig

_ADAPTER = tuple(field.name for field in dataclasses.fields(AdapterSettings))
_SOURCE = ("tokenizer", "revision", "activation")


@click.command()
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The checkpoint folder to write.")
@click.option("--held-out", type=click.Path(path_type=Path), help="Text to measure on. [default: the last 5% of TEXT]")
@click.option(
    "--from",
    "checkpoint",
    metavar="CHECKPOINT",
    help="Start from the weights of a Hugging Face folder, a hub id, a nanoGPT ckpt.pt or `austen`, with their shape "
    "and tokenizer.",
)
@click.option("--tokenizer", metavar="PATH|ID", help="With --from: where its tokenizer is, as in `ortgpt export`.")
@click.option("--revision", help="With --from: branch, tag or commit of the hub id. [default: main]")
@click.option(
    "--activation",
    metavar="NAME",
    type=click.Choice(ACTIVATIONS),
    help="With --from: activation of a nanoGPT file, as in `ortgpt export`. [default: gelu]",
)
@lambda command: add_flags(command, dataclasses.fields(AdapterSettings))
@lambda command: add_flags(command, dataclasses.fields(TrainingConfig))
def train(texts: tuple[Path, ...], out: Path, held_out: Path | None, checkpoint: str | None, **options: Any) -> None:
    """Train a GPT on UTF-8 text files, into a Hugging Face folder.

    From scratch by default: a small GPT-2 with a tokenizer of its own. With --from, the weights of CHECKPOINT are
    trained further; with --lora-rank, an adapter to them. After an interruption, the same command continues from the
    last saved state (in OUT.training).
    """
    with one_line_errors():
        from ortgpt_models.atomic_folder import refuse_existing
        from ortgpt_models.corpus import read_texts
        from ortgpt_models.train import train as train_network
        from ortgpt_models.training_device import choose_device

        adapter = AdapterSettings(**{name: options.pop(name) for name in _ADAPTER})
        source = {name: options.pop(name) for name in _SOURCE}
        config = TrainingConfig(**options)
        # These fail before a checkpoint is downloaded, not after it.
        refuse_existing(out)
        choose_device(config.device, bfloat16=config.bfloat16, compiles=config.compile)
        read_texts(texts, held_out)
        with progress_bar("train") as bar:
            result = train_network(
                texts,
                out,
                config=config,
                held_out=held_out,
                start=_starting_point(checkpoint, source, config, adapter, bar),
                on_progress=lambda progress: show_progress(bar, progress),
                on_note=write_note,
            )
    before = "" if result.bits_per_byte_before is None else f", before the training {result.bits_per_byte_before:.4f}"
    click.echo(f"{out}  held out {result.bits_per_byte:.4f} bits per byte{before}", err=True)


def _starting_point(
    checkpoint: str | None, source: Mapping[str, Any], config: TrainingConfig, adapter: AdapterSettings, bar: Any
) -> Any:
    """Return the StartingPoint that --from names, or None without it, where its options are refused."""
    if checkpoint is None:
        idle = set_flags({**source, "lora_rank": adapter.lora_rank})
        if idle:
            raise OptionError(f"{', '.join(idle)} would have no effect (accepted with --from)")
        return None
    from ortgpt_exporter.checkpoint.load import CheckpointSource
    from ortgpt_exporter.starting_point import open_starting_point

    return open_starting_point(
        CheckpointSource(checkpoint, **source),
        config,
        adapter,
        on_progress=lambda progress: show_progress(bar, progress),
        on_note=lambda note: write_note(f"Note: {note}"),
    )
