"""From a float32 bundle to a quantised one that carries the evidence, or to nothing where it is not good enough."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

import ortgpt
from ortgpt.bundle import Bundle, describe_files, open_bundle
from ortgpt.contract import DType, File, Key, Promise, RecipeName, Target
from ortgpt.cpus import cpu_features
from ortgpt.engine import Engine
from ortgpt.errors import OptionError
from ortgpt.manifest import Evidence, Manifest, Precision
from ortgpt.session import Device, open_graph
from ortgpt.tokenizer import Tokenizer
from ortgpt_exporter.bundle_folder import check_target, save_graph, weight_bytes
from ortgpt_exporter.calibrate import MOST_TOKENS, ROW_TOKENS, Calibration
from ortgpt_exporter.dynamic import quantize_dynamic
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evidence import (
    Independence,
    Likeness,
    compare,
    measure_independence,
    measure_speed,
)
from ortgpt_exporter.quantize import (
    FindHessian,
    Report,
    balance,
    expected_matrices,
    matrix_widths,
    product_inputs,
    quantize_graph,
)
from ortgpt_exporter.recipe import BITS, DYNAMIC, GPTQ, Recipe, make_recipe
from ortgpt_exporter.steps import OnProgress, Progress, Steps
from ortgpt_exporter.texts import TextRows, read_text, rows_to_measure, spread_rows
from ortgpt_exporter.verify import rounded
from ortgpt_models.folder import write_folder

_MOST_RATIO = {DType.INT8: 1.01, DType.INT4: 1.05}
_WIDENED = (4, 2)  # after a failed gate in 4 bits, one in so many matrices gets 8 bits: first a quarter, then half
_NOT_COPIED = (File.MODEL, File.MODEL_DATA)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What is asked for; None is chosen (see recipe.make_recipe).

    `calibration` is the UTF-8 file that the method gptq reads: it wants one, and no other method takes one. `eval_text`
    is the file to measure on, by default 2,048 tokens drawn from the float32 model itself. The gate: the bundle is
    written only if the ratio of perplexities, and the mean KL divergence in nats where given, are no more than these.
    """

    dtype: str
    method: str | None = None
    block_size: int | None = None
    head_dtype: str | None = None
    calibration: Path | None = None
    eval_text: Path | None = None
    max_perplexity_ratio: float | None = None
    max_kl: float | None = None

    @property
    def most_ratio(self) -> float:
        return _MOST_RATIO[self.dtype] if self.max_perplexity_ratio is None else self.max_perplexity_ratio


def quantize_bundle(
    bundle: str | Path,
    out: str | Path,
    quantization: Quantization,
    *,
    external_data: bool = False,
    force: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> Bundle:
    """Quantise a float32 bundle into the folder `out`, measure both, and return the new one opened.

    Weights of more than 1.5 GB, or any with `external_data`, get a file of their own. Where 4 bits fail the gate, the
    matrices that rounding changed most get 8, up to half of them. Raises ExportError for a bundle of another kind, a
    recipe that does not fit or a gate that fails; OptionError, BundleError, FileExistsError or another OSError.
    """
    check_quantization(quantization)
    source, out = open_bundle(bundle), Path(os.path.abspath(out))
    check_source(source)
    check_target(out, force=force)
    source.verify_hashes()
    recipe = recipe_for(source, quantization)
    tokenizer = Tokenizer.load(source.path)
    calibration = _calibration(source, recipe, tokenizer, quantization.calibration)
    given = None if quantization.eval_text is None else read_text(tokenizer, quantization.eval_text, least=1)
    with write_folder(out, replace=force) as folder:
        on_progress(Progress(f"rounding to {recipe.dtype}", 0, 1))
        job = _Job(source, folder, quantization, calibration, external_data)
        report = job.write(recipe)  # before the float32 network is opened: both at once would take twice the memory
        with ortgpt.load(source.path, device=Target.CPU, verify="size") as generator:
            text = rows_to_measure(generator, given)
            steps = Steps(on_progress, len(text.rows) + 4, begun=1)
            candidate, recipe, report, likeness = job.pass_gate(generator.engine, recipe, report, text.rows, steps)
            steps.next("measuring independence")
            independence = measure_independence(candidate, text.rows)
            steps.next("measuring speed")
            evidence = _evidence(generator.engine, candidate, folder, report, likeness, text)
        steps.next("writing the manifest")
        manifest = _manifest(source, folder, recipe, calibration, independence, evidence)
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        open_bundle(folder)
    steps.finish()
    return open_bundle(out)


def check_quantization(quantization: Quantization) -> None:
    """Raise OptionError naming every value that is not accepted."""
    faults = [
        f"{name} = {value!r} (accepted: a number above {least})"
        for name, value, least in (
            ("max_perplexity_ratio", quantization.max_perplexity_ratio, 1),
            ("max_kl", quantization.max_kl, 0),
        )
        if value is not None and not value > least
    ]
    if quantization.dtype not in BITS:
        faults.insert(0, f"dtype = {quantization.dtype!r} (accepted: {', '.join(BITS)})")
    if faults:
        raise OptionError("; ".join(faults))


def _calibration(source: Bundle, recipe: Recipe, tokenizer: Tokenizer, path: Path | None) -> TextRows | None:
    """Return the text that the method reads, if it reads one.

    Raises ExportError where it wants one, would not use one, or it is shorter than a block.
    """
    if recipe.method != GPTQ:
        if path is not None:
            raise ExportError(f"calibration = {path} would have no effect (accepted with the method {GPTQ})")
        return None
    if path is None:
        raise ExportError(f"the method {GPTQ} wants a calibration text; name a UTF-8 file, of what the model will read")
    text = read_text(tokenizer, path, least=recipe.block_size or 1)
    return spread_rows(text, min(ROW_TOKENS, source.config.n_positions), most=MOST_TOKENS)


def check_source(source: Bundle) -> None:
    """Raise ExportError unless a bundle is one to quantise."""
    graph = source.manifest.graphs[0]
    dtype = source.manifest.precision.dtype
    cache_dtype = None if graph.cache is None else graph.cache.dtype
    if (dtype, cache_dtype) != (DType.FLOAT32, DType.FLOAT32):
        raise ExportError(
            f"{source.path} is {dtype} (accepted: float32); export the checkpoint anew, or name the bundle that this "
            "one was made of"
        )


def recipe_for(source: Bundle, asked: Quantization) -> Recipe:
    """Return the recipe asked for. Raises ExportError where it does not fit the matrices of the bundle."""
    widths = matrix_widths(ir.load(source.path / File.MODEL))
    missing = expected_matrices(source.config.n_layer) - widths.keys()
    if missing:
        raise ExportError(
            f"{source.path / File.MODEL} has no float32 matrix {min(missing)} ({len(missing)} are missing); export the "
            "checkpoint anew"
        )
    return make_recipe(
        widths,
        flavour=source.manifest.graphs[0].flavour,
        dtype=asked.dtype,
        method=asked.method,
        block_size=asked.block_size,
        head_dtype=asked.head_dtype,
    )


@dataclass(frozen=True)
class _Job:
    """One bundle to make: from which, into which folder, and how."""

    source: Bundle
    folder: Path
    asked: Quantization
    calibration: TextRows | None
    external_data: bool

    def write(self, recipe: Recipe) -> Report:
        return write_quantized(
            self.source, self.folder, recipe, calibration=self.calibration, external_data=self.external_data
        )

    def pass_gate(
        self, baseline: Engine, recipe: Recipe, report: Report, rows: list[list[int]], steps: Steps
    ) -> tuple[Engine, Recipe, Report, Likeness]:
        """Measure what was written; in 4 bits, widen the most sensitive matrices as long as the gate fails."""
        candidate = open_quantized(self.source, self.folder)
        likeness = compare(baseline, candidate, rows, on_row=lambda: steps.next("measuring"))
        for part in _WIDENED if recipe.dtype == DType.INT4 else ():
            if self._passes(likeness):
                break
            recipe = replace(recipe, wider=_most_sensitive(report, part))
            del candidate
            report = self.write(recipe)
            candidate = open_quantized(self.source, self.folder)
            likeness = compare(baseline, candidate, rows)
        if not self._passes(likeness):
            raise ExportError(self._failure(recipe, likeness))
        return candidate, recipe, report, likeness

    def _passes(self, likeness: Likeness) -> bool:
        most_kl = math.inf if self.asked.max_kl is None else self.asked.max_kl
        return likeness.perplexity_ratio <= self.asked.most_ratio and likeness.kl <= most_kl

    def _failure(self, recipe: Recipe, likeness: Likeness) -> str:
        wider = f", with {len(recipe.wider)} matrices in 8 bits" if recipe.wider else ""
        most_kl = "any" if self.asked.max_kl is None else self.asked.max_kl
        return (
            f"the {recipe.dtype} bundle fails its gate: perplexity ratio {likeness.perplexity_ratio:.4f} (accepted: "
            f"{self.asked.most_ratio:g}), KL {likeness.kl:.4f} (accepted: {most_kl}) over {likeness.tokens:,} tokens"
            f"{wider}; try a smaller block size, head_dtype int8, int8, or a wider gate"
        )


def _most_sensitive(report: Report, part: int) -> tuple[str, ...]:
    """Return the matrices of the layers that rounding changed most, one in `part`."""
    layers = sorted((name for name in report.errors if name.startswith("h.")), key=report.errors.__getitem__)
    return tuple(sorted(layers[-(-len(layers) * (part - 1) // part) :]))


def write_quantized(
    source: Bundle,
    folder: Path,
    recipe: Recipe,
    *,
    calibration: TextRows | None = None,
    external_data: bool = False,
) -> Report:
    """Write all files of a quantised bundle but its manifest into `folder`, in place of what is there."""
    for path in folder.iterdir():
        path.unlink()
    if recipe.method in DYNAMIC:
        report = quantize_dynamic(source, folder, recipe.method, external_data=external_data)
    else:
        model = ir.load(source.path / File.MODEL)
        balance(model, recipe.dtype, n_layer=source.config.n_layer)
        with _hessians(model, recipe, calibration) as hessian_of:
            report = quantize_graph(model, recipe, hessian_of)
        ir.external_data.load_to_model(model)  # what was not quantised may lie in the source's own file of weights
        save_graph(model, folder, external_data=external_data)
    for name in source.manifest.files.keys() - _NOT_COPIED:
        shutil.copyfile(source.path / name, folder / name)
    return report


@contextlib.contextmanager
def _hessians(model: ir.Model, recipe: Recipe, calibration: TextRows | None) -> Iterator[FindHessian | None]:
    if calibration is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Calibration(model, product_inputs(model), calibration.rows, recipe.flavour, Path(folder)).hessian


def open_quantized(source: Bundle, folder: Path) -> Engine:
    """Open what write_quantized() wrote, for the CPU."""
    draft = replace(source, path=folder)
    session = open_graph(draft, source.manifest.graphs[0], Device(Target.CPU))
    return Engine(session, source.config, masked_tokens=source.manifest.masked_tokens)


def _evidence(
    baseline: Engine, candidate: Engine, folder: Path, report: Report, likeness: Likeness, text: TextRows
) -> Evidence:
    before, after = measure_speed([baseline, candidate])
    bits = 1 / (text.size_bytes * math.log(2))
    return Evidence(
        text=text.name,
        tokens=likeness.tokens,
        perplexity=rounded(likeness.perplexity),
        baseline_perplexity=rounded(likeness.baseline_perplexity),
        bits_per_byte=rounded(likeness.nll * bits),
        baseline_bits_per_byte=rounded(likeness.baseline_nll * bits),
        kl=rounded(likeness.kl),
        top1=rounded(likeness.top1),
        top5=rounded(likeness.top5),
        bytes_per_parameter=rounded(weight_bytes(ir.load(folder / File.MODEL)) / report.parameters),
        prefill_tokens_per_s=after.prefill,
        baseline_prefill_tokens_per_s=before.prefill,
        decode_tokens_per_s=after.decode,
        baseline_decode_tokens_per_s=before.decode,
        threads=candidate.session.threads,
        cpu_features=cpu_features(),
        matrices=report.quantized,
        left_out=report.kept,
    )


def _manifest(
    source: Bundle,
    folder: Path,
    recipe: Recipe,
    calibration: TextRows | None,
    independence: Independence,
    evidence: Evidence,
) -> Manifest:
    bound = recipe.name != RecipeName.DYNAMIC_TENSOR
    promise: Mapping[str, object] = {
        Key.KIND: Promise.BOUNDED if bound else Promise.BATCH_DEPENDENT,
        Key.LOGIT_BOUND: independence.logit_bound,
        Key.BATCH_FLIPS: independence.batch_flips,
        Key.OUTLIER_FLIPS: independence.outlier_flips,
        Key.PIECE_FLIPS: independence.piece_flips,
        Key.STEP_FLIPS: independence.step_flips,
    }
    parameters = recipe.parameters
    if calibration is not None:
        parameters["calibration"] = {"text": calibration.name, "tokens": calibration.tokens}
    return replace(
        source.manifest,
        precision=Precision(dtype=recipe.dtype, recipe=recipe.name, parameters=parameters, promise=promise),
        files=describe_files(folder, [path.name for path in folder.iterdir()]),
        verification=(),
        evidence=evidence,
    )
