"""Write the files of a quantised bundle from those of a float32 bundle, and open them. Measures nothing."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import FileEntry, GraphSpec
from ortgpt.classifier import Classifier
from ortgpt.contract import DType, File, Flavour, Role, Target
from ortgpt.engine.engine import Engine
from ortgpt.engine.prefill_graph import find_prefill_graph
from ortgpt.ort.device import Device
from ortgpt.ort.session import open_graph
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.graph.read import read_graph
from ortgpt_exporter.graph.save import save_graph
from ortgpt_exporter.quantization.hessians import Calibration
from ortgpt_exporter.quantization.optimum_dynamic import quantize_dynamic
from ortgpt_exporter.quantization.prefill_graph import made_matrices, write_prefill
from ortgpt_exporter.quantization.recipe import Recipe
from ortgpt_exporter.quantization.request import DYNAMIC
from ortgpt_exporter.quantization.rewrite_graph import (
    FindHessian,
    Report,
    RoundedMatrices,
    expected_matrices,
    matrix_widths,
    needs_hessian,
    product_inputs,
    quantize_graph,
    smooth_graph,
)
from ortgpt_exporter.texts import TextRows

_NOT_COPIED = (File.MODEL, File.MODEL_DATA)


def check_source(source: Bundle) -> None:
    """Raise ExportError unless the bundle is float32."""
    dtype = source.manifest.precision.dtype
    if dtype != DType.FLOAT32:
        raise ExportError(
            f"{source.path} is {dtype} (accepted: float32); export the checkpoint in float32, or name the bundle that "
            "this one was made from"
        )


def source_widths(source: Bundle) -> dict[str, int]:
    """Return the length of the rows of each matrix of a bundle, by name. Raises ExportError where one is missing."""
    try:
        widths = matrix_widths(read_graph(source.path))
    except DecodeError as error:
        raise ExportError(
            f"{source.path / File.MODEL} is not an ONNX graph ({error}); export the checkpoint again"
        ) from None
    missing = expected_matrices(source.config.n_layer) - widths.keys()
    if missing:
        raise ExportError(
            f"{source.path / File.MODEL} has no float32 matrix {min(missing)} ({len(missing)} are missing); export the "
            "checkpoint again"
        )
    return widths


def write_quantized(
    source: Bundle,
    folder: Path,
    recipe: Recipe,
    *,
    calibration: TextRows | None = None,
    external_data: bool = False,
    rounded: RoundedMatrices | None = None,
) -> Report:
    """Write all files of a quantised bundle but its manifest into `folder`, and remove what was there.

    `calibration` is the text of GPTQ; `rounded` is as in quantize_graph().
    """
    for path in folder.iterdir():
        path.unlink()
    if recipe.method in DYNAMIC:
        report = quantize_dynamic(source, folder, recipe.method, external_data=external_data)
    else:
        model = read_graph(source.path)
        norm = source.manifest.architecture.norm
        smooth_graph(model, recipe.dtype, n_layer=source.config.n_layer, norm=norm)
        wanted = needs_hessian(model, recipe, rounded or {})
        with _hessians(model, recipe, calibration, folder, wanted) as hessian_of:
            report = quantize_graph(model, recipe, hessian_of, rounded=rounded)
        del hessian_of  # and with it the session of the float32 network
        ir.external_data.load_to_model(model)  # weights that stay may lie in the source's file of weights
        save_graph(model, folder, recipe.flavour, external_data=external_data)
        if recipe.flavour == Flavour.NATIVE and recipe.block_size is not None and source.labels is None:
            write_prefill(folder)
    for name in source.manifest.files.keys() - _NOT_COPIED:
        shutil.copyfile(source.path / name, folder / name)
    return report


@contextlib.contextmanager
def _hessians(
    model: ir.Model, recipe: Recipe, calibration: TextRows | None, parent: Path, wanted: Collection[str]
) -> Iterator[FindHessian | None]:
    if calibration is None or not wanted:
        yield None
        return
    activations = product_inputs(model)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Calibration(model, activations, calibration.rows, recipe.flavour, Path(folder), wanted=wanted).hessian


def open_quantized(source: Bundle, folder: Path) -> Engine:
    """Open on the CPU what write_quantized() wrote."""
    return open_engine(_unsealed(source, folder))


def open_quantized_classifier(source: Bundle, folder: Path, tokenizer: Tokenizer) -> Classifier:
    """Open on the CPU the classifier that write_quantized() wrote."""
    return open_classifier(_unsealed(source, folder), tokenizer)


def _unsealed(source: Bundle, folder: Path) -> Bundle:
    # The manifest is not written yet. Opening a graph reads only the names of the files.
    files = {path.name: FileEntry(size=path.stat().st_size, sha256="") for path in folder.iterdir()}
    manifest = replace(source.manifest, graphs=graphs_in(source, folder), files=files)
    return replace(source, path=folder, manifest=manifest, places={})


def open_engine(bundle: Bundle) -> Engine:
    """Open a bundle's decoder on the CPU, and the graph for prompts if there is one."""
    session = open_graph(bundle, bundle.manifest.graphs[0], Device(Target.CPU))
    masked_tokens, prefill_graph = bundle.manifest.masked_tokens, find_prefill_graph(bundle, session)
    return Engine(session, bundle.config, masked_tokens=masked_tokens, prefill_graph=prefill_graph)


def open_classifier(bundle: Bundle, tokenizer: Tokenizer) -> Classifier:
    """Open the bundle of a classifier on the CPU."""
    return Classifier(bundle, open_graph(bundle, bundle.manifest.graphs[0], Device(Target.CPU)), tokenizer)


def graphs_in(source: Bundle, folder: Path) -> tuple[GraphSpec, ...]:
    """Return the manifest's entries for the graphs that write_quantized() wrote."""
    decoder = source.manifest.graphs[0]
    if not (folder / File.PREFILL).exists():
        return (decoder,)
    return decoder, replace(decoder, role=Role.PROMPT, file=File.PREFILL, made=made_matrices(folder))
