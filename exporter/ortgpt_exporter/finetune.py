"""Fine-tune a checkpoint for a task, and export the result: data → training → checkpoint → bundle, in one folder."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ortgpt.bundle.folder import Bundle
from ortgpt.classifier_input import InputReader
from ortgpt.contract import DType, FineTuning, TokenizerKind
from ortgpt.errors import PromptError, shown
from ortgpt.task_rows import LABEL, TaskRow, right_choice
from ortgpt_exporter.checkpoint.load import Checkpoint, CheckpointSource, load_checkpoint
from ortgpt_exporter.checkpoint.task_tokens import TaskTokenizer, task_tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.export import ExportFormat, export_bundle
from ortgpt_exporter.loss_plot import plot_losses
from ortgpt_exporter.portable_files import tokenizer_json
from ortgpt_exporter.quantization.request import BITS, Quantization
from ortgpt_exporter.task_file import LabelledRow, read_labelled_rows
from ortgpt_models.atomic_folder import refuse_existing, write_folder
from ortgpt_models.classifier import ClassifierConfig
from ortgpt_models.finetune import FineTuningResult, finetune
from ortgpt_models.finetune_config import FineTuneConfig
from ortgpt_models.hf_checkpoint import save_classifier
from ortgpt_models.progress import OnProgress
from ortgpt_models.task_data import TaskData, make_task_data

CHECKPOINT, BUNDLE, LOSSES, RECORD = "checkpoint", "bundle", "losses.json", "training.json"
_MAX_VALUE = 1e18  # of a label: its square, which the loss has, is a float32
_MIN_MEASURED = 16  # held-out rows that quantisation is measured on; with fewer, it is on random tokens
_CUTS = {
    FineTuning.CLASSIFICATION: "their texts lose the end",
    FineTuning.ENTAILMENT: "the longer of their two texts loses the end",
    FineTuning.SIMILARITY: "the longer of their two texts loses the end",
    FineTuning.MULTIPLE_CHOICE: "their contexts lose the beginning",
}


@dataclass(frozen=True, kw_only=True)
class FineTunedBundle:
    """What a fine-tuning wrote."""

    bundle: Bundle
    """The bundle."""
    result: FineTuningResult
    """The network, and how the losses went."""
    data: TaskData
    """What it was trained and measured on."""


def finetune_checkpoint(
    task: str,
    data: Path,
    source: CheckpointSource,
    out: Path,
    *,
    config: FineTuneConfig,
    held_out: Path | None = None,
    dtype: str = DType.FLOAT32,
    plot: Path | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> FineTunedBundle:
    """Fine-tune a language model on the JSON lines of `data`, and write checkpoint, bundle and losses into `out`.

    `task` is one of contract.FineTuning. Without `held_out`, a file of further rows, a share of the rows is held out.
    `out` appears whole or not at all, with the folders `checkpoint` and `bundle` (of `dtype`), losses.json and
    training.json. `plot` is a file for a drawing of the losses. After an interruption, the same call goes on from the
    state in `out`.training. Raises ExportError for data or a checkpoint that cannot be used, ModelError,
    OptionError, FileExistsError if `out` exists, or another OSError.
    """
    refuse_existing(out)
    ExportFormat(dtype=dtype)  # what cannot be exported is refused before the work
    checkpoint = load_checkpoint(source, on_progress=on_progress)
    tokens = _tokens_for(task, checkpoint, source)
    for note in checkpoint.notes:
        on_note(note)
    n_positions = checkpoint.gpt.config.n_positions
    reader = InputReader(
        checkpoint.tokenizer_files.tokenizer,
        template=tokens.template,
        finetuning_task=task,
        labels_tokens=False,
        limit=checkpoint.tokenizer_files.tokenizer.vocab_size,
        n_positions=n_positions,
        cuts=True,
    )
    rows = read_labelled_rows(data, reader, _label_reader(task))
    measured = None if held_out is None else read_labelled_rows(held_out, reader, _label_reader(task))
    values = make_task_data(
        task,
        _pairs(rows),
        None if measured is None else _pairs(measured),
        share=config.held_out_share,
        seed=config.seed,
    )
    cut = sum(row.asked.cut > 0 for row in (*rows, *(measured or ())))
    if cut:
        count = len(rows) + len(measured or ())
        on_note(f"{cut:,} of {count:,} rows are longer than the context of {n_positions:,} tokens; {_CUTS[task]}")
    for note in values.notes:
        on_note(note)
    written: list[Bundle] = []

    def write(result: FineTuningResult) -> None:
        with write_folder(out) as folder:
            _write_checkpoint(result, tokens, checkpoint, folder / CHECKPOINT)
            lines = _held_out_lines(rows, measured, values)
            told = {*checkpoint.notes}
            bundle = _export(folder, dtype, lines, on_progress, lambda note: None if note in told else on_note(note))
            record = _record(task, checkpoint, data, held_out, config, values, result)
            for name, each in ((LOSSES, asdict(result.losses)), (RECORD, record)):
                (folder / name).write_text(json.dumps(each, indent=2) + "\n", encoding="utf-8", newline="\n")
            if plot is not None:
                plot_losses(result.losses, plot, unit="nats" if values.has_classes else "mean squared error")
        written.append(replace(bundle, path=out.absolute() / BUNDLE, places={}))

    result = finetune(
        checkpoint.gpt,
        values,
        out,
        config=config,
        new_ids=tokens.new_ids,
        start_id=tokens.start_id,
        source=checkpoint.source.sha256,
        write=write,
        on_progress=on_progress,
        on_note=on_note,
    )
    return FineTunedBundle(bundle=written[0], result=result, data=values)


def _tokens_for(task: str, checkpoint: Checkpoint, source: CheckpointSource) -> TaskTokenizer:
    """Return the tokenizer with the task's tokens. Raises ExportError for a checkpoint that cannot be fine-tuned."""
    files = checkpoint.tokenizer_files
    if checkpoint.classifier is not None:
        raise ExportError(
            f"{source.name} is a classifier ({checkpoint.classifier.config.architecture}); name the language model "
            "that it was made from"
        )
    if files.kind == TokenizerKind.NONE:
        raise ExportError(f"{source.name} has no tokenizer, and a task needs one (accepted: one with --tokenizer)")
    return task_tokenizer(task, files, tokenizer_json(files), checkpoint.gpt.config.bos_token_id)


def _label_reader(task: str) -> Callable[[TaskRow], Any]:
    return _answer if task == FineTuning.MULTIPLE_CHOICE else _label


def _label(row: TaskRow) -> Any:
    """Return the label of a row. Raises PromptError for one that is no text and no number."""
    value = row.rest.get(LABEL)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        what = f"{LABEL} = {shown(value)}" if LABEL in row.rest else f'no "{LABEL}"'
        raise PromptError(f"{what} (accepted: a text or an integer, or a number for a regression)")
    if isinstance(value, float) and not abs(value) <= _MAX_VALUE:
        raise PromptError(f"{LABEL} = {shown(value)} (accepted for a regression: -{_MAX_VALUE:g} to {_MAX_VALUE:g})")
    return value


def _answer(row: TaskRow) -> int:
    return right_choice(row.rest, row.choices)


def _pairs(rows: Sequence[LabelledRow]) -> list[tuple[tuple[tuple[int, ...], ...], Any]]:
    return [(tuple(map(tuple, row.asked.rows)), row.label) for row in rows]


def _held_out_lines(rows: Sequence[LabelledRow], measured: Sequence[LabelledRow] | None, data: TaskData) -> list[str]:
    """Return the lines of the held-out rows."""
    if measured is not None:
        return [row.text for row in measured]
    held_out = {each.rows for each in data.held_out}
    return [row.text for row in rows if tuple(map(tuple, row.asked.rows)) in held_out]


def _write_checkpoint(result: FineTuningResult, tokens: TaskTokenizer, checkpoint: Checkpoint, folder: Path) -> None:
    folder.mkdir()
    save_classifier(result.classifier, folder)
    tokens.write(folder, checkpoint.tokenizer_files, result.classifier.gpt.config.n_positions)


def _export(
    folder: Path, dtype: str, lines: Sequence[str], on_progress: OnProgress, on_note: Callable[[str], None]
) -> Bundle:
    """Export the checkpoint in a folder; quantisation is measured on the held-out lines if there are enough."""
    with tempfile.TemporaryDirectory() as scratch:
        quantization = None
        if dtype in BITS:
            path = Path(scratch) / "held-out.jsonl"
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
            quantization = Quantization(dtype=dtype, eval_text=path if len(lines) >= _MIN_MEASURED else None)
        return export_bundle(
            folder / CHECKPOINT,
            folder / BUNDLE,
            dtype=dtype,
            quantization=quantization,
            on_progress=on_progress,
            on_note=on_note,
        )


def _record(
    task: str,
    checkpoint: Checkpoint,
    data: Path,
    held_out: Path | None,
    config: FineTuneConfig,
    values: TaskData,
    result: FineTuningResult,
) -> dict[str, Any]:
    """Return how the checkpoint came about, for training.json."""
    best = result.losses.best
    names = ("held_out_accuracy", "majority_share") if values.has_classes else (
        "held_out_mean_abs_error", "mean_abs_error_of_the_mean",
    )  # fmt: skip
    labels: ClassifierConfig = result.classifier.config
    return {
        "task": task,
        "from": asdict(checkpoint.source),
        "recipe": asdict(config),
        "data": {"file": data.name, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()},
        "held_out": held_out.name if held_out else f"{config.held_out_share:.0%} of the rows, drawn by the seed",
        "labels": list(labels.labels),
        "problem_type": labels.problem_type,
        "training_rows": len(values.training),
        "held_out_rows": len(values.held_out),
        "steps": result.steps,
        "written_step": best.step,
        "held_out_loss": round(best.loss, 6),
        names[0]: round(best.metric, 6),
        names[1]: round(values.baseline, 6),
    }
