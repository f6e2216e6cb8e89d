"""Train small networks in several ways, and draw their held-out losses: what is said of this family, seen.

training_curves.py FIGURE WORK_FOLDER TEXT... trains the networks of one figure on the texts but the last, measures them
on the last, and draws docs/assets/training-FIGURE.svg; it prints the last losses as a table. FIGURE is one of

    norm     pre-norm and post-norm, 6 and 24 layers, with and without warm-up
    scaling  the same with warm-up, with and without the scaling of the residual projections
    sizes    four sizes of one shape

A network that WORK_FOLDER has is not trained again, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from publish import GREY, STYLE

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
HELD_OUT_CHARACTERS = 60_000  # of the last text: enough for two digits after the point
NARROW = {
    "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 512, "dropout": 0.0, "steps": 500, "batch_size": 16,
    "learning_rate": 3e-3, "evaluate_every": 25,
}  # fmt: skip
OF_SIZES = {
    "n_positions": 128, "vocab_size": 1024, "dropout": 0.0, "steps": 600, "batch_size": 16, "learning_rate": 2e-3,
    "evaluate_every": 100,
}  # fmt: skip
SIZES = ((2, 64), (4, 128), (6, 192), (8, 256))  # layers, width; heads of 32
WARMUP_STEPS = 100
COLOURS = {"pre": "#1a73e8", "post": "#e8710a"}


@dataclass(frozen=True)
class Line:
    """One network of a figure, and how it is drawn."""

    panel: str
    """Title of its panel."""
    label: str
    """Its entry in the legend, and in the table."""
    settings: Mapping[str, Any]
    """The fields of TrainingConfig."""
    colour: str
    """Colour of its line."""
    dashed: bool
    """Whether the line is dashed."""


def lines_of(figure: str) -> list[Line]:
    """Return the networks of a figure."""
    if figure == "sizes":
        return [
            Line("", f"{layers} layers, {width} wide", shape | OF_SIZES, COLOURS["pre"], False)
            for layers, width in SIZES
            for shape in [{"n_layer": layers, "n_embd": width, "n_head": width // 32}]
        ]
    found = []
    for layers in (6, 24):
        for norm, colour in COLOURS.items():
            for usual in (True, False):
                settings: dict[str, Any] = NARROW | {"n_layer": layers, "norm": norm, "warmup_steps": WARMUP_STEPS}
                if figure == "norm":
                    label = f"{norm}-norm, {'warm-up' if usual else 'no warm-up'}"
                    settings |= {"warmup_steps": WARMUP_STEPS if usual else 0}
                else:
                    label = f"{norm}-norm, {'scaled' if usual else 'not scaled'}"
                    settings |= {"residual_scaling": usual}
                found.append(Line(f"{layers} layers", label, settings, colour, not usual))
    return found


def train_line(line: Line, work: Path, texts: list[Path], held_out: Path) -> dict[str, Any]:
    """Train a network, unless `work` has it; return its record, training.json."""
    import torch

    from ortgpt_models.train import train
    from ortgpt_models.training_config import TrainingConfig

    config = TrainingConfig(**line.settings).resolved()  # figures share networks
    out = work / hashlib.sha256(repr(config).encode()).hexdigest()[:12]
    if not out.exists():
        torch.set_num_threads(1)  # two small networks side by side are faster than one after the other
        train(texts, out, config=config, held_out=held_out)
    record: dict[str, Any] = json.loads((out / "training.json").read_text(encoding="utf-8"))
    return record


def draw_curves(lines: list[Line], records: list[dict[str, Any]], path: Path) -> None:
    """Draw the held-out loss by step, a panel for each number of layers."""
    panels = list(dict.fromkeys(line.panel for line in lines))
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(8, 3.4), sharey=True, layout="constrained")
    for axes, panel in zip(all_axes, panels, strict=True):
        for line, record in zip(lines, records, strict=True):
            if line.panel == panel:
                steps, losses = zip(*record["held_out_losses"], strict=True)
                axes.plot(steps, losses, label=line.label, color=line.colour, linestyle="--" if line.dashed else "-")
        axes.set_title(panel, color=GREY)
        axes.set_xlabel("steps")
    all_axes[0].set_ylabel("held-out loss, bits per byte")
    all_axes[-1].legend(frameon=False)
    save(figure, path)


def draw_sizes(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the last held-out loss by the number of parameters."""
    figure, axes = pyplot.subplots(figsize=(5, 3.2), layout="constrained")
    parameters = [record["parameters"] for record in records]
    losses = [record["held_out_bits_per_byte"] for record in records]
    axes.plot(parameters, losses, marker="o", color=COLOURS["pre"])
    for record, count, loss in zip(records, parameters, losses, strict=True):
        label = f"{record['recipe']['n_layer']} × {record['recipe']['n_embd']}"
        axes.annotate(label, (count, loss), (7, 5), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xticks(parameters, [f"{count / 1e6:.2g} M" for count in parameters])
    axes.minorticks_off()
    axes.margins(0.12)
    axes.set_xlabel("parameters")
    axes.set_ylabel("held-out loss, bits per byte")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.grid(alpha=0.25)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("norm", "scaling", "sizes"))
    parser.add_argument("work", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    args = parser.parse_args()
    if len(args.texts) < 2:
        parser.error("two texts or more: the last one is measured on")
    matplotlib.use("svg")
    pyplot.rcParams.update(STYLE | {"axes.labelcolor": GREY, "legend.labelcolor": GREY})
    args.work.mkdir(parents=True, exist_ok=True)
    held_out = args.work / "held-out.txt"
    held_out.write_text(args.texts[-1].read_text(encoding="utf-8")[:HELD_OUT_CHARACTERS], encoding="utf-8")
    lines = lines_of(args.figure)
    job = partial(train_line, work=args.work, texts=args.texts[:-1], held_out=held_out)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        records = list(pool.map(job, lines))
    path = ASSETS / f"training-{args.figure}.svg"
    if args.figure == "sizes":
        draw_sizes(records, path)
    else:
        draw_curves(lines, records, path)
    for line, record in zip(lines, records, strict=True):
        print(f"| {line.panel} | {line.label} | {record['held_out_bits_per_byte']:.3f} |")


if __name__ == "__main__":
    main()
