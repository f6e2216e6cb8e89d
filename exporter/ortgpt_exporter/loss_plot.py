"""Draw how the losses of a fine-tuning went, as PNG or SVG. Needs the extra [plot]."""

from __future__ import annotations

from pathlib import Path

from ortgpt_models.finetune import Losses

_WINDOW = 10  # steps whose losses are averaged


def plot_losses(losses: Losses, path: Path, *, unit: str) -> None:
    """Draw the task's loss on the rows that are trained on, averaged over 10 steps, and on those held out.

    `unit` is what the loss is measured in. Raises ModuleNotFoundError naming `matplotlib` without the extra; OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [each.step for each in losses.training]
    values = [each.task_loss for each in losses.training]
    means = [
        sum(values[max(0, end - _WINDOW) : end]) / len(values[max(0, end - _WINDOW) : end])
        for end in range(1, len(values) + 1)
    ]
    axes.plot(steps, means, color="tab:blue", label=f"training, mean of {_WINDOW} steps")
    held_out = [(each.step, each.loss) for each in losses.held_out]
    axes.plot(*zip(*held_out, strict=True), color="tab:orange", marker="o", label="held out")
    axes.plot(losses.best.step, losses.best.loss, color="tab:red", marker="o", linestyle="", label="written")
    axes.set_xlabel("steps")
    axes.set_ylabel(f"loss ({unit})")
    axes.legend()
    figure.savefig(path, format=path.suffix[1:], dpi=150)
