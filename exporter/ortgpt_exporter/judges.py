"""What decides whether a quantised bundle is accepted, and what its manifest says of it: one judge for each task.

A judge compares the float32 bundle with what was written from it. Rounds and writes nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import Agreement, Evidence, Promise
from ortgpt.classifier import Classifier, load_classifier
from ortgpt.classifier_input import InputReader
from ortgpt.contract import DType, File, Target
from ortgpt.engine.engine import Engine
from ortgpt.errors import ContextLengthError, PromptError
from ortgpt.model import LoadedModel, open_model
from ortgpt.ort.cpus import cpu_features
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.agreement import (
    Difference,
    compare_labels,
    measure_batch_changes,
    measure_text_speed,
    random_rows,
)
from ortgpt_exporter.evaluation.batch_effects import measure_batch_effects
from ortgpt_exporter.evaluation.divergence import Divergence, compare
from ortgpt_exporter.evaluation.sample import Ids, sample_rows
from ortgpt_exporter.evaluation.speed import measure_speed
from ortgpt_exporter.evaluation.verify import rounded
from ortgpt_exporter.graph.save import weight_bytes
from ortgpt_exporter.quantization.hessians import MAX_TOKENS, ROW_TOKENS
from ortgpt_exporter.quantization.recipe import Recipe
from ortgpt_exporter.quantization.request import BLOCK_SIZES, DYNAMIC, GPTQ, Quantization
from ortgpt_exporter.quantization.rewrite_graph import Report
from ortgpt_exporter.quantization.write import open_engine, open_quantized, open_quantized_classifier
from ortgpt_exporter.task_file import is_json_lines, read_task_row
from ortgpt_exporter.texts import TextRows, read_lines, read_text, rows_to_measure, spread_rows

# What a classifier may lose: KL divergence in nats, and, of a regression, the difference in units of the values' range.
_MAX_KL = {DType.INT8: 0.01, DType.INT4: 0.05}
_MAX_PART = {DType.INT8: 0.05, DType.INT4: 0.2}


class Judge(ABC):
    """Measures one quantisation of a bundle."""

    def __init__(self, source: Bundle, quantization: Quantization) -> None:
        self.source = source
        self.quantization = quantization

    calibration: TextRows | None
    """The text to calibrate by, if there is one."""
    row_count: int
    """How many rows are measured."""

    @abstractmethod
    def measure(self, folder: Path, *, on_row: Callable[[], None]) -> None:
        """Open both bundles and compare them; `on_row` is called after each row."""

    @abstractmethod
    def close(self) -> None:
        """Close both bundles: Windows renames no folder while one of its files is mapped."""

    @property
    @abstractmethod
    def accepts(self) -> bool:
        """Whether the loss is accepted."""

    @abstractmethod
    def losses(self) -> str:
        """Return what was lost and what would be accepted, for a message."""

    @abstractmethod
    def limits(self) -> str:
        """Return the name of the limits that could be larger, for a message."""

    @abstractmethod
    def promise(self, kind: str) -> Promise:
        """Measure what a batch changes, as a promise of `kind`."""

    @abstractmethod
    def evidence(self, folder: Path, report: Report) -> dict[str, Any]:
        """Measure the speed; return what the manifest says of the comparison, by its key."""

    def failure(self, recipe: Recipe) -> ExportError:
        """Return the error for a loss that is not accepted."""
        wider = f", with {len(recipe.wider)} matrices in 8 bits" if recipe.wider else ""
        hints = [f"a larger {self.limits()}"] if self.limits() else []
        if recipe.dtype == DType.INT4:
            hints += [DType.INT8] if recipe.head_dtype == DType.INT8 else [DType.INT8, f"head_dtype {DType.INT8}"]
            hints += [] if recipe.method == GPTQ else [f"the method {GPTQ}"]
        if recipe.block_size is not None and recipe.block_size > BLOCK_SIZES[-1]:
            hints.append("a smaller block_size")
        tried = f"; try {', '.join(hints[:0:-1])}{' or ' if hints[1:] else ''}{hints[0]}" if hints else ""
        return ExportError(f"the {recipe.dtype} bundle loses too much accuracy: {self.losses()}{wider}{tried}")


class LanguageModelJudge(Judge):
    """Compares what both predict of a text."""

    def __init__(self, source: Bundle, recipe: Recipe, quantization: Quantization) -> None:
        """Read the texts. Raises ExportError for one that is too short or not UTF-8; OSError."""
        super().__init__(source, quantization)
        model = open_float32(source)
        self.calibration = calibration_for(source, recipe, model.tokenizer, quantization)
        self._text = rows_to_measure(model, quantization.eval_text)
        # The text of a request may be too short, or have one row.
        is_drawn = quantization.eval_text is None
        self._rows = self._text.rows if is_drawn else sample_rows(model.engine, source.config.start_id)
        self.row_count = len(self._text.rows)
        self._engines: list[Engine] = []
        self._divergence: Divergence | None = None

    def measure(self, folder: Path, *, on_row: Callable[[], None]) -> None:
        self._engines = [open_engine(self.source), open_quantized(self.source, folder)]
        self._divergence = compare(self._engines[0], self._engines[1], self._text.rows, on_row=on_row)

    def close(self) -> None:
        self._engines.clear()

    @property
    def _found(self) -> Divergence:
        assert self._divergence is not None, "measure() comes first"
        return self._divergence

    @property
    def accepts(self) -> bool:
        max_kl = math.inf if self.quantization.max_kl is None else self.quantization.max_kl
        return self._found.perplexity_ratio <= self.quantization.max_ratio and self._found.kl <= max_kl

    def losses(self) -> str:
        max_kl = "any" if self.quantization.max_kl is None else repr(self.quantization.max_kl)
        return (
            f"perplexity ratio {self._found.perplexity_ratio:.4f} (accepted: {self.quantization.max_ratio!r}), KL "
            f"{self._found.kl:.3g} (accepted: {max_kl}) over {self._found.tokens:,} tokens"
        )

    def limits(self) -> str:
        return "max_perplexity_ratio" if self.quantization.max_kl is None else "max_perplexity_ratio or max_kl"

    def promise(self, kind: str) -> Promise:
        return measure_batch_effects(self._engines[1], self._rows, kind)

    def evidence(self, folder: Path, report: Report) -> dict[str, Any]:
        before, after = measure_speed(self._engines)
        per_byte = 1 / (self._text.size_bytes * math.log(2)) if self._text.size_bytes else None
        found = self._found
        return {
            "evidence": Evidence(
                text=self._text.name,
                tokens=found.tokens,
                perplexity=rounded(found.perplexity),
                baseline_perplexity=rounded(found.baseline_perplexity),
                bits_per_byte=per_byte and rounded(found.nll * per_byte),
                baseline_bits_per_byte=per_byte and rounded(found.baseline_nll * per_byte),
                kl=rounded(found.kl),
                top1=rounded(found.top1),
                top5=rounded(found.top5),
                bytes_per_parameter=rounded(weight_bytes(ir.load(folder / File.MODEL)) / report.parameters),
                prefill_tokens_per_s=after.prefill,
                baseline_prefill_tokens_per_s=before.prefill,
                decode_tokens_per_s=after.decode,
                baseline_decode_tokens_per_s=before.decode,
                threads=self._engines[1].session.threads,
                cpu_features=cpu_features(),
                matrices=report.quantized,
                left_out=report.left_out,
            )
        }


class ClassifierJudge(Judge):
    """Compares the labels that both give."""

    def __init__(self, source: Bundle, recipe: Recipe, quantization: Quantization) -> None:
        """Read the texts. Raises ExportError for one that does not fit, or for choices that do not."""
        super().__init__(source, quantization)
        check_classifier_request(quantization, recipe)
        with load_classifier(source.path, device=Target.CPU, verify="size") as classifier:
            self._tokenizer = classifier.tokenizer
            self.calibration = calibration_for(source, recipe, self._tokenizer, quantization)
            self._rows, self._text = _rows_to_label(classifier, quantization.eval_text)
        self.row_count = len(self._rows)
        self._pair: list[Classifier] = []
        self._difference: Difference | None = None

    def measure(self, folder: Path, *, on_row: Callable[[], None]) -> None:
        before = load_classifier(self.source.path, device=Target.CPU, verify="size")
        self._pair = [before, open_quantized_classifier(self.source, folder, self._tokenizer)]
        self._difference = compare_labels(self._pair[0], self._pair[1], self._rows, on_row=on_row)

    def close(self) -> None:
        self._pair.clear()

    @property
    def _found(self) -> Difference:
        assert self._difference is not None, "measure() comes first"
        return self._difference

    @property
    def _max_kl(self) -> float:
        limit = self.quantization.max_kl
        return _MAX_KL[self.quantization.dtype] if limit is None else limit

    @property
    def _max_diff(self) -> float:
        return _MAX_PART[self.quantization.dtype] * self._found.logit_range

    @property
    def accepts(self) -> bool:
        if self._found.kl is None:
            return self._found.max_abs_diff <= self._max_diff
        return self._found.kl <= self._max_kl

    def losses(self) -> str:
        if self._found.kl is None:
            part = _MAX_PART[self.quantization.dtype]
            lost = (
                f"a value differs by {self._found.max_abs_diff:.3g} (accepted: {self._max_diff:.3g}, {part} of the "
                "range of the values)"
            )
        else:
            lost = f"KL {self._found.kl:.3g} (accepted: {self._max_kl!r})"
        return f"{lost} over {self._found.labelled:,} texts or tokens of {self._text}"

    def limits(self) -> str:
        return "" if self._found.kl is None else "max_kl"

    def promise(self, kind: str) -> Promise:
        return measure_batch_changes(self._pair[1], self._rows, kind)

    def evidence(self, folder: Path, report: Report) -> dict[str, Any]:
        before, after = measure_text_speed(self._pair)
        found = self._found
        return {
            "agreement": Agreement(
                text=self._text,
                texts=len(self._rows),
                labelled=found.labelled,
                kl=None if found.kl is None else rounded(found.kl),
                same_labels=None if found.same_labels is None else rounded(found.same_labels),
                max_abs_diff=rounded(found.max_abs_diff),
                bytes_per_parameter=rounded(weight_bytes(ir.load(folder / File.MODEL)) / report.parameters),
                tokens_per_s=after,
                baseline_tokens_per_s=before,
                threads=self._pair[1].session.threads,
                cpu_features=cpu_features(),
                matrices=report.quantized,
                left_out=report.left_out,
            )
        }


def check_classifier_request(quantization: Quantization, recipe: Recipe) -> None:
    """Raise ExportError for what a classifier cannot be quantised with."""
    if recipe.method in DYNAMIC:
        raise ExportError(f"method = {recipe.method!r} is for language models; leave it out for a classifier")
    if quantization.max_perplexity_ratio is not None:
        raise ExportError("max_perplexity_ratio would have no effect with a classifier (accepted: max_kl)")


def _rows_to_label(classifier: Classifier, path: str | Path | None) -> tuple[list[Ids], str]:
    """Return the rows of a file, one of each line, cut to the context, and its name; without one, random tokens.

    A line of a *.jsonl is a row of a task, any other line a text. Raises ExportError for one that cannot be read.
    """
    if path is None:
        return random_rows(classifier), "random tokens"
    reader = InputReader.of_bundle(classifier.bundle, classifier.tokenizer, cuts=True)
    rows: list[Ids] = []
    for number, line in read_lines(path):
        name = f"{path} line {number}"
        try:
            rows += read_task_row(reader, line, name).rows if is_json_lines(path) else reader.read(line, name).rows
        except (PromptError, ContextLengthError) as error:
            raise ExportError(str(error)) from None
    return rows, Path(path).name


def open_float32(source: Bundle) -> LoadedModel:
    """Open the bundle to quantise on the CPU."""
    return open_model(source.path, device=Target.CPU, threads=None, verify="size")


def calibration_for(
    source: Bundle, recipe: Recipe, tokenizer: Tokenizer, quantization: Quantization
) -> TextRows | None:
    """Return the text to calibrate by, if there is one. Raises ExportError if it is shorter than a block."""
    if quantization.calibration is None:
        return None
    text = read_text(tokenizer, quantization.calibration, min_tokens=recipe.block_size or 1)
    return spread_rows(text, min(ROW_TOKENS, source.config.n_positions), max_tokens=MAX_TOKENS)
