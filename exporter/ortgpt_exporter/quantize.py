"""Quantise a float32 bundle, measure what that costs, and write the new bundle only if the loss is accepted."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from ortgpt.bundle.folder import Bundle, describe_files, open_bundle
from ortgpt.bundle.manifest import Precision, Promise
from ortgpt.contract import DType, File, PromiseKind, RecipeName
from ortgpt_exporter.judges import ClassifierJudge, LanguageModelJudge
from ortgpt_exporter.progress import Steps
from ortgpt_exporter.quantization.recipe import Recipe, make_recipe
from ortgpt_exporter.quantization.request import Quantization, check_quantization
from ortgpt_exporter.quantization.rewrite_graph import Report, RoundedMatrices
from ortgpt_exporter.quantization.write import (
    check_source,
    graphs_in,
    source_widths,
    write_quantized,
)
from ortgpt_exporter.target_folder import check_target
from ortgpt_exporter.texts import TextRows
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
    # Neither graph takes memory while matrices are rounded.
    judge = (LanguageModelJudge if source.labels is None else ClassifierJudge)(source, recipe, quantization)
    calibration = judge.calibration
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
            steps = Steps(on_progress, judge.row_count + 3, begun=1)
            judge.measure(folder, on_row=partial(steps.next, "measuring"))
            if judge.accepts:
                break
            judge.close()
        else:
            raise judge.failure(recipe)
        steps.next("measuring batch effects")
        bounded = recipe.name != RecipeName.DYNAMIC_TENSOR
        promise = judge.promise(PromiseKind.BOUNDED if bounded else PromiseKind.BATCH_DEPENDENT)
        steps.next("measuring speed")
        manifest = replace(
            source.manifest,
            graphs=graphs_in(source, folder),
            precision=_precision(recipe, calibration, promise),
            files=describe_files(folder, [path.name for path in folder.iterdir()]),
            verification=(),
            **judge.evidence(folder, report),
        )
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
        bundle = open_bundle(folder)
        judge.close()
        steps.finish()
    return replace(bundle, path=out, places={})


def recipe_for(source: Bundle, quantization: Quantization) -> Recipe:
    """Return the recipe for a bundle. Raises ExportError if the request does not fit its matrices."""
    return make_recipe(quantization, source_widths(source), flavour=source.manifest.graphs[0].flavour)


def _most_sensitive(report: Report, part: int) -> tuple[str, ...]:
    """Return the matrices of the layers that rounding changed most, one in `part`; none if that is 0."""
    if part == 0:
        return ()
    layers = sorted((name for name in report.errors if name.startswith("h.")), key=report.errors.__getitem__)
    return tuple(sorted(layers[-(-len(layers) * (part - 1) // part) :]))


def _precision(recipe: Recipe, calibration: TextRows | None, promise: Promise) -> Precision:
    parameters = recipe.parameters
    if calibration is not None:
        parameters["calibration"] = {"text": calibration.name, "tokens": calibration.tokens}
    return Precision(dtype=recipe.dtype, recipe=recipe.name, parameters=parameters, promise=promise)
