"""Quantise a float32 bundle, measure what that costs, and write the new bundle only if the loss is accepted."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from ortgpt.bundle.folder import Bundle, describe_files, open_bundle
from ortgpt.bundle.manifest import Evidence, Precision, Promise
from ortgpt.contract import DType, File, PromiseKind, RecipeName, Target
from ortgpt.engine.engine import Engine
from ortgpt.model import LoadedModel, open_model
from ortgpt.ort.cpus import cpu_features
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.batch_effects import measure_batch_effects
from ortgpt_exporter.evaluation.divergence import Divergence, compare
from ortgpt_exporter.evaluation.sample import sample_rows
from ortgpt_exporter.evaluation.speed import measure_speed
from ortgpt_exporter.evaluation.verify import rounded
from ortgpt_exporter.graph.save import weight_bytes
from ortgpt_exporter.progress import Steps
from ortgpt_exporter.quantization.hessians import MAX_TOKENS, ROW_TOKENS
from ortgpt_exporter.quantization.recipe import Recipe, make_recipe
from ortgpt_exporter.quantization.request import BLOCK_SIZES, GPTQ, Quantization, check_quantization
from ortgpt_exporter.quantization.rewrite_graph import Report, RoundedMatrices
from ortgpt_exporter.quantization.write import (
    check_source,
    graphs_in,
    open_engine,
    open_quantized,
    source_widths,
    write_quantized,
)
from ortgpt_exporter.target_folder import check_target
from ortgpt_exporter.texts import TextRows, read_text, rows_to_measure, spread_rows, start_id_of
from ortgpt_models.atomic_folder import write_folder
from ortgpt_models.progress import OnProgress, Progress

_WIDENED = (4, 2)  # if 4 bits lose too much accuracy, one in so many matrices gets 8 bits: first a quarter, then half


def quantize_bundle(
    bundle: str | Path,
    out: str | Path,
    quantization: Quantization,
    *,
    external_data: bool = False,
    force: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> Bundle:
    """Quantise a float32 bundle into the folder `out`, measure both, and return the new bundle opened.

    If the accuracy with 4 bits is not accepted, the matrices that rounding changed most get 8 bits, up to half of them.
    Weights get a file of their own as in export_bundle(); `force` is as there. Raises ExportError for a bundle that is
    not float32, choices that do not fit, or a loss that is not accepted; OptionError for a bad value; BundleError;
    FileExistsError or another OSError.
    """
    source, out = open_bundle(bundle), Path(os.path.abspath(out))
    check_quantization(quantization, source.manifest.graphs[0].flavour)
    check_source(source)
    check_target(out, force=force)
    if source.path.resolve() in (out.resolve(), *out.resolve().parents):
        raise FileExistsError(f"{out} lies in the bundle that it would be made from; choose a name outside it")
    source.verify_hashes()
    return quantize_opened(source, out, quantization, external_data=external_data, force=force, on_progress=on_progress)


def quantize_opened(
    source: Bundle, out: Path, quantization: Quantization, *, external_data: bool, force: bool, on_progress: OnProgress
) -> Bundle:
    """Do the work of quantize_bundle() for an opened bundle with intact files and a checked request."""
    recipe = recipe_for(source, quantization)
    on_progress(Progress("opening the float32 bundle", 0, 1))
    model = open_float32(source)
    calibration = calibration_for(source, recipe, model.tokenizer, quantization)
    text = rows_to_measure(model, quantization.eval_text)
    # The text of a request may be too short, or have one row.
    rows = text.rows if quantization.eval_text is None else sample_rows(model.engine, start_id_of(model))
    del model  # neither graph takes memory while matrices are rounded
    retries = _WIDENED if recipe.dtype == DType.INT4 else ()
    matrices: RoundedMatrices | None = {} if retries else None  # what a retry does not round again
    with write_folder(out, replace=force) as folder:
        in_4_bits = Report()  # what rounding to 4 bits changed decides which matrices get 8
        for part in (0, *retries):
            recipe = replace(recipe, wider=_most_sensitive(in_4_bits, part))
            on_progress(Progress(f"rounding to {recipe.dtype}", 0, 1))
            report = write_quantized(
                source, folder, recipe, calibration=calibration, external_data=external_data, rounded=matrices
            )
            in_4_bits = report if part == 0 else in_4_bits
            steps = Steps(on_progress, len(text.rows) + 3, begun=1)
            engines = [open_engine(source), open_quantized(source, folder)]
            divergence = compare(engines[0], engines[1], text.rows, on_row=partial(steps.next, "measuring"))
            if _accepts(quantization, divergence):
                break
            engines.clear()
        else:
            raise ExportError(_failure(recipe, divergence, quantization))
        baseline, candidate = engines
        steps.next("measuring batch effects")
        bounded = recipe.name != RecipeName.DYNAMIC_TENSOR
        kind = PromiseKind.BOUNDED if bounded else PromiseKind.BATCH_DEPENDENT
        promise = measure_batch_effects(candidate, rows, kind)
        steps.next("measuring speed")
        manifest = replace(
            source.manifest,
            graphs=graphs_in(source, folder),
            precision=_precision(recipe, calibration, promise),
            files=describe_files(folder, [path.name for path in folder.iterdir()]),
            verification=(),
            evidence=_evidence(baseline, candidate, folder, report, divergence, text),
        )
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
        bundle = open_bundle(folder)
        del engines, baseline, candidate  # Windows renames no folder while one of its files is mapped
        steps.finish()
    return replace(bundle, path=out, places={})


def open_float32(source: Bundle) -> LoadedModel:
    """Open the bundle to quantise on the CPU."""
    return open_model(source.path, device=Target.CPU, threads=None, verify="size")


def recipe_for(source: Bundle, quantization: Quantization) -> Recipe:
    """Return the recipe for a bundle. Raises ExportError if the request does not fit its matrices."""
    return make_recipe(quantization, source_widths(source), flavour=source.manifest.graphs[0].flavour)


def calibration_for(
    source: Bundle, recipe: Recipe, tokenizer: Tokenizer, quantization: Quantization
) -> TextRows | None:
    """Return the text to calibrate by, if there is one. Raises ExportError if it is shorter than a block."""
    if quantization.calibration is None:
        return None
    text = read_text(tokenizer, quantization.calibration, min_tokens=recipe.block_size or 1)
    return spread_rows(text, min(ROW_TOKENS, source.config.n_positions), max_tokens=MAX_TOKENS)


def _accepts(quantization: Quantization, divergence: Divergence) -> bool:
    max_kl = math.inf if quantization.max_kl is None else quantization.max_kl
    return divergence.perplexity_ratio <= quantization.max_ratio and divergence.kl <= max_kl


def _failure(recipe: Recipe, divergence: Divergence, quantization: Quantization) -> str:
    wider = f", with {len(recipe.wider)} matrices in 8 bits" if recipe.wider else ""
    max_kl = "any" if quantization.max_kl is None else repr(quantization.max_kl)
    hints = [
        "a larger max_perplexity_ratio" if quantization.max_kl is None else "a larger max_perplexity_ratio or max_kl"
    ]
    if recipe.dtype == DType.INT4:
        hints += [DType.INT8] if recipe.head_dtype == DType.INT8 else [DType.INT8, f"head_dtype {DType.INT8}"]
        hints += [] if recipe.method == GPTQ else [f"the method {GPTQ}"]
    if recipe.block_size is not None and recipe.block_size > BLOCK_SIZES[-1]:
        hints.append("a smaller block_size")
    return (
        f"the {recipe.dtype} bundle loses too much accuracy: perplexity ratio {divergence.perplexity_ratio:.4f} "
        f"(accepted: {quantization.max_ratio!r}), KL {divergence.kl:.3g} (accepted: {max_kl}) over "
        f"{divergence.tokens:,} tokens{wider}; try {', '.join(hints[:0:-1])}{' or ' if hints[1:] else ''}{hints[0]}"
    )


def _most_sensitive(report: Report, part: int) -> tuple[str, ...]:
    """Return the matrices of the layers that rounding changed most, one in `part`; none if that is 0."""
    if part == 0:
        return ()
    layers = sorted((name for name in report.errors if name.startswith("h.")), key=report.errors.__getitem__)
    return tuple(sorted(layers[-(-len(layers) * (part - 1) // part) :]))


def _evidence(
    baseline: Engine, candidate: Engine, folder: Path, report: Report, divergence: Divergence, text: TextRows
) -> Evidence:
    before, after = measure_speed([baseline, candidate])
    per_byte = 1 / (text.size_bytes * math.log(2)) if text.size_bytes else None
    return Evidence(
        text=text.name,
        tokens=divergence.tokens,
        perplexity=rounded(divergence.perplexity),
        baseline_perplexity=rounded(divergence.baseline_perplexity),
        bits_per_byte=per_byte and rounded(divergence.nll * per_byte),
        baseline_bits_per_byte=per_byte and rounded(divergence.baseline_nll * per_byte),
        kl=rounded(divergence.kl),
        top1=rounded(divergence.top1),
        top5=rounded(divergence.top5),
        bytes_per_parameter=rounded(weight_bytes(ir.load(folder / File.MODEL)) / report.parameters),
        prefill_tokens_per_s=after.prefill,
        baseline_prefill_tokens_per_s=before.prefill,
        decode_tokens_per_s=after.decode,
        baseline_decode_tokens_per_s=before.decode,
        threads=candidate.session.threads,
        cpu_features=cpu_features(),
        matrices=report.quantized,
        left_out=report.left_out,
    )


def _precision(recipe: Recipe, calibration: TextRows | None, promise: Promise) -> Precision:
    parameters = recipe.parameters
    if calibration is not None:
        parameters["calibration"] = {"text": calibration.name, "tokens": calibration.tokens}
    return Precision(dtype=recipe.dtype, recipe=recipe.name, parameters=parameters, promise=promise)
