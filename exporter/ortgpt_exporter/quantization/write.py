"""Write the files of a quantised bundle, from those of a float32 one, and open them. Measures nothing."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import FileEntry, GraphSpec
from ortgpt.contract import DType, File, Role, Target
from ortgpt.engine.engine import Engine
from ortgpt.engine.prefill_graph import find_prefill_graph
from ortgpt.ort.device import Device
from ortgpt.ort.session import open_graph
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.graph.save import save_graph
from ortgpt_exporter.quantization.hessians import Calibration
from ortgpt_exporter.quantization.optimum_dynamic import quantize_dynamic
from ortgpt_exporter.quantization.prefill_graph import write_prefill
from ortgpt_exporter.quantization.recipe import DYNAMIC, Recipe
from ortgpt_exporter.quantization.rewrite_graph import (
    FindHessian,
    Report,
    balance,
    expected_matrices,
    matrix_widths,
    product_inputs,
    quantize_graph,
)
from ortgpt_exporter.texts import TextRows

_NOT_COPIED = (File.MODEL, File.MODEL_DATA)


def check_source(source: Bundle) -> None:
    """Raise ExportError unless a bundle is one to quantise."""
    dtype = source.manifest.precision.dtype
    if dtype != DType.FLOAT32:
        raise ExportError(
            f"{source.path} is {dtype} (accepted: float32); export the checkpoint anew, or name the bundle that this "
            "one was made of"
        )


def source_widths(source: Bundle) -> dict[str, int]:
    """Return the length of the rows of each matrix of a bundle, by name. Raises ExportError where one is missing."""
    try:
        widths = matrix_widths(ir.load(source.path / File.MODEL))
    except DecodeError as error:
        raise ExportError(
            f"{source.path / File.MODEL} is no ONNX graph ({error}); export the checkpoint anew"
        ) from None
    missing = expected_matrices(source.config.n_layer) - widths.keys()
    if missing:
        raise ExportError(
            f"{source.path / File.MODEL} has no float32 matrix {min(missing)} ({len(missing)} are missing); export the "
            "checkpoint anew"
        )
    return widths


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
        with _hessians(model, recipe, calibration, folder) as hessian_of:
            report = quantize_graph(model, recipe, hessian_of)
        del hessian_of  # and with it the float32 network that it ran
        ir.external_data.load_to_model(model)  # what was not quantised may lie in the source's own file of weights
        save_graph(model, folder, recipe.flavour, external_data=external_data)
        if recipe.fast_prefill:
            write_prefill(folder)
    for name in source.manifest.files.keys() - _NOT_COPIED:
        shutil.copyfile(source.path / name, folder / name)
    return report


@contextlib.contextmanager
def _hessians(
    model: ir.Model, recipe: Recipe, calibration: TextRows | None, parent: Path
) -> Iterator[FindHessian | None]:
    if calibration is None:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Calibration(model, product_inputs(model), calibration.rows, recipe.flavour, Path(folder)).hessian


def open_quantized(source: Bundle, folder: Path) -> Engine:
    """Open what write_quantized() wrote, for the CPU."""
    # Not sealed yet: of the files their names are all that opening a graph looks at.
    files = {path.name: FileEntry(size=path.stat().st_size, sha256="") for path in folder.iterdir()}
    manifest = replace(source.manifest, graphs=graphs_in(source, folder), files=files)
    draft = replace(source, path=folder, manifest=manifest)
    session = open_graph(draft, draft.manifest.graphs[0], Device(Target.CPU))
    prefill_graph = find_prefill_graph(draft, session)
    return Engine(session, source.config, masked_tokens=source.manifest.masked_tokens, prefill_graph=prefill_graph)


def graphs_in(source: Bundle, folder: Path) -> tuple[GraphSpec, ...]:
    """Return what the manifest says of the graphs that write_quantized() wrote."""
    decoder = source.manifest.graphs[0]
    if not (folder / File.PREFILL).exists():
        return (decoder,)
    return decoder, replace(decoder, role=Role.PREFILL, file=File.PREFILL)
