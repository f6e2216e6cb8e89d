"""Split a quantised head into parts that read the embedding's bytes directly from the file of weights.

Otherwise ONNX Runtime copies the embedding, to reshape it, each time the graph is opened. It then packs each weight
into a second copy while the file's bytes are still mapped. With a head in parts, only one part is in memory twice at a
time, so the peak is lower. Knows no recipe.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ortgpt_exporter.graph.initializers import initializer, same_bytes
from ortgpt_exporter.graph.torch_modules import MICROSOFT

_PARTS = 4  # more parts save little memory, and each is a node more in every step


def view_head(path: Path) -> None:
    """Rewrite the graph at `path`, whose weights are in a file of their own, if its head reads a Reshape."""
    model = ir.load(path)
    graph = model.graph
    for node in list(graph):
        stored = [value for value in node.inputs[1:] if value is not None]
        if node.op_type != "MatMulNBits" or not all(map(_is_reshaped, stored)):
            continue
        rows = node.attributes["N"].as_int()
        bounds = [rows * part // _PARTS for part in range(_PARTS + 1)]
        parts = [
            ir.node(
                "MatMulNBits",
                [node.inputs[0], *(_rows(graph, value, rows, begin, end) for value in stored)],
                {**node.attributes, "N": end - begin},
                domain=MICROSOFT,
            )
            for begin, end in itertools.pairwise(bounds)
        ]
        whole = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": -1}, name=node.name)
        whole.outputs[0].shape, whole.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], [*parts, whole], [node.outputs[0]], [whole.outputs[0]]
        )
    RemoveUnusedNodesPass()(model)
    ir.save(model, path)


def _is_reshaped(value: ir.Value) -> bool:
    """Tell whether a value is a reshaped weight of the file."""
    producer = value.producer()
    source = producer.inputs[0] if producer is not None and producer.op_type == "Reshape" else None
    return source is not None and isinstance(source.const_value, ir.ExternalTensor)


def _rows(graph: ir.Graph, value: ir.Value, rows: int, begin: int, end: int) -> ir.Value:
    """Return the rows from `begin` to `end` of a reshaped weight: (rows, blocks, bytes), or scales in one axis."""
    reshape = value.producer()
    assert reshape is not None
    weight, shape = (None if value is None else value.const_value for value in reshape.inputs)
    assert isinstance(weight, ir.ExternalTensor)
    assert shape is not None
    row_bytes = weight.nbytes // rows
    whole, *others = shape.numpy().tolist()
    sizes = [end - begin if whole == rows else weight.size // rows * (end - begin), *others]
    name = f"{weight.name}.rows.{begin}"
    nbytes = row_bytes * (end - begin)
    return initializer(graph, same_bytes(weight, name, shape=sizes, begin=row_bytes * begin, nbytes=nbytes))
