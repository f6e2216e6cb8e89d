"""Save a graph as the model of a bundle, and count the bytes of its weights. Knows no manifest."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from ortgpt.contract import File, Flavour
from ortgpt_exporter.graph.split_head import view_head

MAX_GRAPH_BYTES = 1_500_000_000  # of weights in the graph's own file; protobuf's limit is 2 GiB


def save_graph(model: ir.Model, folder: Path, flavour: str, *, external_data: bool) -> None:
    """Write a graph as a bundle's model.onnx.

    The weights get a file of their own if the graph is native, if they are large, or with `external_data`. ONNX Runtime
    maps such a file into memory; it parses and copies weights in the graph's own file. Most other readers of portable
    graphs expect one file.
    """
    separate = external_data or flavour == Flavour.NATIVE or weight_bytes(model) > MAX_GRAPH_BYTES
    ir.save(model, folder / File.MODEL, external_data=File.MODEL_DATA if separate else None)
    if flavour == Flavour.NATIVE:
        view_head(folder / File.MODEL)
    onnx.checker.check_model(folder / File.MODEL)


def weight_bytes(model: ir.Model) -> int:
    """Return the size of a graph's weights in bytes; several views of the same bytes of a file count once."""
    inside, ends = 0, dict[str, int]()
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            ends[tensor.path] = max(ends.get(tensor.path, 0), (tensor.offset or 0) + tensor.nbytes)
        elif tensor is not None:
            inside += tensor.nbytes
    return inside + sum(ends.values())
