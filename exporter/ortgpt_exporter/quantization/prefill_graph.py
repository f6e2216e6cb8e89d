"""Make the graph for prompts of a bundle whose decoder multiplies in blocks: it multiplies whole rows of bytes.

It has almost no bytes of its own: the runtime makes its matrices of the decoder's integers when it opens the graph (see
`ortgpt.ort.whole_rows`). Knows no recipe and no float32 bundle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ortgpt.bundle.manifest import WholeRows
from ortgpt.contract import File
from ortgpt.ort.whole_rows import whole_rows
from ortgpt_exporter.graph.initializers import constant, initializer
from ortgpt_exporter.quantization.integer_nodes import fused_rows_product
from ortgpt_exporter.quantization.recipe import EMBEDDING, HEAD
from ortgpt_exporter.quantization.rewrite_graph import raise_versions, replace_node


def write_prefill(folder: Path) -> None:
    """Write the graph for prompts beside the decoder in `folder`."""
    model = ir.load(folder / File.MODEL)
    for node in list(model.graph):
        if not _is_layers_product(node):
            continue
        matrix = _whole_rows(node)
        if matrix is None:
            weights, scales = _stored(model.graph, node)
        else:
            weights = _made(model.graph, matrix.name, ir.DataType.INT8, (matrix.columns, matrix.rows))
            scales = _made(model.graph, matrix.scales_name, ir.DataType.FLOAT, (matrix.rows,))
        replace_node(model.graph, node, fused_rows_product(model.graph, node.inputs[0], weights, scales))
    RemoveUnusedNodesPass()(model)  # and the decoder's integers and scales, which nothing reads here
    raise_versions(model)
    ir.save(model, folder / File.PREFILL)


def made_matrices(folder: Path) -> tuple[WholeRows, ...]:
    """Return the matrices that the runtime has to make for the graph for prompts in `folder`."""
    found = (_whole_rows(node) for node in ir.load(folder / File.MODEL).graph if _is_layers_product(node))
    return tuple(matrix for matrix in found if matrix is not None)


def _is_layers_product(node: ir.Node) -> bool:
    """Tell whether a node multiplies by a matrix of a layer; the head computes few rows of a prompt."""
    integers = node.inputs[1] if node.op_type == "MatMulNBits" else None
    return integers is not None and not str(integers.name).startswith((EMBEDDING, HEAD))


def _whole_rows(node: ir.Node) -> WholeRows | None:
    """Return how to make a node's matrix; None if it is so small that it lies in the graph's own file."""
    integers, scales = (None if value is None else value.const_value for value in node.inputs[1:3])
    if not isinstance(integers, ir.ExternalTensor) or not isinstance(scales, ir.ExternalTensor):
        return None
    rows, columns, bits, block_size = _sizes(node)
    return WholeRows(
        name=_name(node),
        file=File.MODEL_DATA,
        rows=rows,
        columns=columns,
        bits=bits,
        block_size=block_size,
        integers=integers.offset or 0,
        scales=scales.offset or 0,
    )


def _stored(graph: ir.Graph, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the bytes and the scales of a node's matrix as constants of the graph."""
    rows, columns, bits, block_size = _sizes(node)
    packed, scales = (value.const_value.numpy() for value in node.inputs[1:3] if value and value.const_value)
    blocks = -(-columns // block_size)
    bytes_, row_scales = whole_rows(
        packed.reshape(rows, blocks, -1), scales.reshape(rows, blocks), bits=bits, columns=columns
    )
    return constant(graph, _name(node), bytes_), constant(graph, f"{_name(node)}.scales", row_scales)


def _sizes(node: ir.Node) -> tuple[int, ...]:
    return tuple(node.attributes[name].as_int() for name in ("N", "K", "bits", "block_size"))


def _name(node: ir.Node) -> str:
    """Return the name of the bytes of a node's matrix: that of its integers, with another ending."""
    assert node.inputs[1] is not None
    return str(node.inputs[1].name).rpartition(".")[0] + ".rows"


def _made(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    """Return an initializer that the runtime fills."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return initializer(
        graph, ir.ExternalTensor(File.MADE, 0, int(nbytes), dtype, shape=ir.Shape(shape), name=name, base_dir="")
    )
