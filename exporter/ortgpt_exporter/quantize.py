"""From a float32 bundle to a quantised one that carries the evidence, or to nothing where it is not good enough."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

import ortgpt
from ortgpt.bundle.folder import Bundle, describe_files, open_bundle
from ortgpt.bundle.manifest import Evidence, Manifest, Precision, Promise
from ortgpt.contract import DType, File, PromiseKind, RecipeName, Target
from ortgpt.engine.engine import Engine
from ortgpt.ort.cpus import cpu_features
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.batch_effects import BatchEffects, measure_batch_effects
from ortgpt_exporter.evaluation.divergence import Divergence, compare
from ortgpt_exporter.evaluation.sample import sample_rows
from ortgpt_exporter.evaluation.speed import measure_speed
from ortgpt_exporter.evaluation.verify import rounded
from ortgpt_exporter.graph.save import weight_bytes
from ortgpt_exporter.progress import OnProgress, Progress, Steps
from ortgpt_exporter.quantization.hessians import MAX_TOKENS, ROW_TOKENS
from ortgpt_exporter.quantization.recipe import BLOCK_SIZES, GPTQ, Recipe, make_recipe
from ortgpt_exporter.quantization.request import Quantization, check_quantization
from ortgpt_exporter.quantization.rewrite_graph import Report
from ortgpt_exporter.quantization.write import check_source, graphs_in, open_quantized, source_widths, write_quantized
from ortgpt_exporter.target_folder import check_target
from ortgpt_exporter.texts import MIN_MEASURED, Text, TextRows, read_text, rows_to_measure, spread_rows
from ortgpt_models.atomic_folder import write_folder

_WIDENED = (4, 2)  # after a failed gate in 4 bits, one in so many matrices gets 8 bits: first a quarter, then half


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

    Weights get a file of their own as in export_bundle(). Where 4 bits fail the gate, the matrices that rounding
    changed most get 8, up to half of them. Raises ExportError for a bundle of another kind, a recipe that does not fit
    or a gate that fails; OptionError, BundleError, FileExistsError or another OSError.
    """
    source, out = open_bundle(bundle), Path(os.path.abspath(out))
    check_quantization(quantization, source.manifest.graphs[0].flavour)
    check_source(source)
    check_target(out, force=force)
    if source.path.resolve() in (out.resolve(), *out.resolve().parents):
        raise FileExistsError(f"{out} lies in the bundle that it would be made of; choose a name outside it")
    source.verify_hashes()
    recipe = recipe_for(source, quantization)
    tokenizer = Tokenizer.load(source.path)
    calibration = calibration_for(source, recipe, tokenizer, quantization.calibration)
    given = None if quantization.eval_text is None else read_text(tokenizer, quantization.eval_text, least=MIN_MEASURED)
    with write_folder(out, replace=force) as folder:
        report = Report()
        for part in (0, *_WIDENED) if recipe.dtype == DType.INT4 else (0,):
            recipe = replace(recipe, wider=_most_sensitive(report, part))
            on_progress(Progress(f"rounding to {recipe.dtype}", 0, 1))
            report = write_quantized(source, folder, recipe, calibration=calibration, external_data=external_data)
            measured = _measure(source, folder, report, quantization, given, on_progress)
            if measured.evidence is not None:
                break
        manifest = _manifest(source, folder, recipe, calibration, measured, quantization)
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        open_bundle(folder)
    return open_bundle(out)


def recipe_for(source: Bundle, asked: Quantization) -> Recipe:
    """Return the recipe asked for. Raises ExportError where it does not fit the matrices of the bundle."""
    return make_recipe(
        source_widths(source),
        flavour=source.manifest.graphs[0].flavour,
        dtype=asked.dtype,
        method=asked.method,
        block_size=asked.block_size,
        head_dtype=asked.head_dtype,
        fast_prefill=asked.fast_prefill,
    )


def calibration_for(source: Bundle, recipe: Recipe, tokenizer: Tokenizer, path: str | Path | None) -> TextRows | None:
    """Return the text to calibrate by, if there is one. Raises ExportError where it is shorter than a block."""
    if path is None:
        return None
    text = read_text(tokenizer, path, least=recipe.block_size or 1)
    return spread_rows(text, min(ROW_TOKENS, source.config.n_positions), most=MAX_TOKENS)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What was measured of a quantised graph; all of it only where it passes the gate."""

    likeness: Divergence
    independence: BatchEffects | None = None
    evidence: Evidence | None = None


def _measure(
    source: Bundle,
    folder: Path,
    report: Report,
    asked: Quantization,
    given: Text | None,
    on_progress: OnProgress,
) -> _Measured:
    """Open both networks and compare them; the float32 one only now, since both and the rounding take much memory."""
    with ortgpt.load(source.path, device=Target.CPU, verify="size") as generator:
        text = rows_to_measure(generator, given)
        steps = Steps(on_progress, len(text.rows) + 3, begun=1)
        candidate = open_quantized(source, folder)
        likeness = compare(generator.engine, candidate, text.rows, on_row=lambda: steps.next("measuring"))
        if not _passes(likeness, asked):
            return _Measured(likeness=likeness)
        steps.next("measuring independence")
        # A given text may be too short, or of one row.
        rows = text.rows if given is None else sample_rows(generator.engine, generator.start_id)
        independence = measure_batch_effects(candidate, rows)
        steps.next("measuring speed")
        evidence = _evidence(generator.engine, candidate, folder, report, likeness, text)
        steps.finish()
    return _Measured(likeness=likeness, independence=independence, evidence=evidence)


def _passes(likeness: Divergence, asked: Quantization) -> bool:
    most_kl = math.inf if asked.max_kl is None else asked.max_kl
    return likeness.perplexity_ratio <= asked.most_ratio and likeness.kl <= most_kl


def _failure(recipe: Recipe, likeness: Divergence, asked: Quantization) -> str:
    wider = f", with {len(recipe.wider)} matrices in 8 bits" if recipe.wider else ""
    most_kl = "any" if asked.max_kl is None else repr(asked.max_kl)
    hints = ["a wider gate"]
    if recipe.dtype == DType.INT4:
        hints += [DType.INT8] if recipe.head_dtype == DType.INT8 else [DType.INT8, f"head_dtype {DType.INT8}"]
        hints += [] if recipe.method == GPTQ else [f"the method {GPTQ}"]
    if recipe.block_size is not None and recipe.block_size > BLOCK_SIZES[-1]:
        hints.append("a smaller block_size")
    return (
        f"the {recipe.dtype} bundle fails its gate: perplexity ratio {likeness.perplexity_ratio:.4f} (accepted: "
        f"{asked.most_ratio!r}), KL {likeness.kl:.3g} (accepted: {most_kl}) over {likeness.tokens:,} tokens{wider}; "
        f"try {', '.join(hints[:0:-1])}{' or ' if hints[1:] else ''}{hints[0]}"
    )


def _most_sensitive(report: Report, part: int) -> tuple[str, ...]:
    """Return the matrices of the layers that rounding changed most, one in `part`; none where that is 0."""
    if part == 0:
        return ()
    layers = sorted((name for name in report.errors if name.startswith("h.")), key=report.errors.__getitem__)
    return tuple(sorted(layers[-(-len(layers) * (part - 1) // part) :]))


def _evidence(
    baseline: Engine, candidate: Engine, folder: Path, report: Report, likeness: Divergence, text: TextRows
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
    measured: _Measured,
    asked: Quantization,
) -> Manifest:
    """Return the manifest of a bundle that passed its gate. Raises ExportError where it did not."""
    independence = measured.independence
    if independence is None:
        raise ExportError(_failure(recipe, measured.likeness, asked))
    bound = recipe.name != RecipeName.DYNAMIC_TENSOR
    promise = Promise(
        kind=PromiseKind.BOUNDED if bound else PromiseKind.BATCH_DEPENDENT,
        logit_bound=independence.logit_bound,
        argmax_changes_in_batch=independence.batch_flips,
        argmax_changes_beside_outliers=independence.outlier_flips,
        argmax_changes_in_prefill=independence.piece_flips,
        argmax_changes_in_steps_of_four=independence.step_flips,
    )
    parameters = recipe.parameters
    if calibration is not None:
        parameters["calibration"] = {"text": calibration.name, "tokens": calibration.tokens}
    return replace(
        source.manifest,
        graphs=graphs_in(source, folder),
        precision=Precision(dtype=recipe.dtype, recipe=recipe.name, parameters=parameters, promise=promise),
        files=describe_files(folder, [path.name for path in folder.iterdir()]),
        verification=(),
        evidence=measured.evidence,
    )
