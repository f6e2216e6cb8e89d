"""What folders of exported and quantised bundles have in common: where they may be, and how a graph is saved."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from ortgpt.contract import File, Flavour
from ortgpt_exporter.graph.split_head import view_head

MAX_GRAPH_BYTES = 1_500_000_000  # of weights within the graph's own file; protobuf ends at 2 GiB


def save_graph(model: ir.Model, folder: Path, flavour: str, *, external_data: bool) -> None:
    """Write a graph as a bundle's model, its weights beside it: a native graph's, large ones, or where it is asked for.

    ONNX Runtime maps a file of weights into memory; those within the graph's own file it parses and copies. Portable
    graphs are read elsewhere, too, where one file is what most expect.
    """
    apart = external_data or flavour == Flavour.NATIVE or weight_bytes(model) > MAX_GRAPH_BYTES
    ir.save(model, folder / File.MODEL, external_data=File.MODEL_DATA if apart else None)
    if flavour == Flavour.NATIVE:
        view_head(folder / File.MODEL)
    onnx.checker.check_model(folder / File.MODEL)


def weight_bytes(model: ir.Model) -> int:
    """Return what the weights of a graph take in bytes; of a file, which they fill, several views count once."""
    inside, ends = 0, dict[str, int]()
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            ends[tensor.path] = max(ends.get(tensor.path, 0), (tensor.offset or 0) + tensor.nbytes)
        elif tensor is not None:
            inside += tensor.nbytes
    return inside + sum(ends.values())
