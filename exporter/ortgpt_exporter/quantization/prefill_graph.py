"""Make the graph for prompts of a bundle whose decoder multiplies in blocks: it multiplies whole rows of bytes.

Memory bandwidth limits a decode step, so the decoder has the fewest bytes. Arithmetic limits a long prompt, and is
fastest when a row of activations and a row of the matrix have one scale each. If the decoder's blocks have scales of
their own, the weights that they represent are rounded again, a row at a time. Knows no recipe and no float32 bundle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ortgpt.contract import File
from ortgpt_exporter.graph.initializers import constant, initializer, same_bytes
from ortgpt_exporter.quantization.blocks import quantize_blocks
from ortgpt_exporter.quantization.integer_nodes import (
    ROW_SCALES,
    blocks_of,
    first_columns,
    fused_rows_product,
    signed_rows,
)
from ortgpt_exporter.quantization.recipe import EMBEDDING, HEAD
from ortgpt_exporter.quantization.rewrite_graph import raise_versions, replace_node

_FLIP = np.array(-128, np.int8)  # turns bytes around 128 into signed ones


def write_prefill(folder: Path) -> None:
    """Write the graph for prompts beside the decoder in `folder`; it shares the decoder's bytes where it can."""
    model = ir.load(folder / File.MODEL)
    own: list[ir.Value] = []
    for node in list(model.graph):
        integers = node.inputs[1] if node.op_type == "MatMulNBits" else None
        if integers is None or integers.name is None or integers.name.startswith((EMBEDDING, HEAD)):
            continue  # the head computes few rows of a prompt
        name, before = integers.name.rpartition(".")[0], []
        scales = model.graph.initializers.get(f"{name}.{ROW_SCALES}")
        if scales is not None:
            before = _signed_columns(model.graph, integers, name, node.attributes["K"].as_int())
            weights, scales = before[-1].outputs[0], _flat(model.graph, scales)
        else:
            matrix = blocks_of(node).dequantized()
            rows = quantize_blocks(matrix, bits=8, block_size=matrix.shape[1])
            weights, scales = signed_rows(model.graph, f"{name}.rows", rows, transposed=True)
            own.append(weights)
        replace_node(model.graph, node, [*before, *fused_rows_product(model.graph, node.inputs[0], weights, scales)])
    RemoveUnusedNodesPass()(model)  # and the decoder's integers and scales, which nothing reads here
    raise_versions(model)
    tensors = [value.const_value for value in own if value.const_value is not None]
    if tensors:
        stored = ir.external_data.convert_tensors_to_external(tensors, folder, File.PREFILL_DATA)
        for value, tensor in zip(own, stored, strict=True):
            value.const_value = tensor
    ir.save(model, folder / File.PREFILL)
    onnx.checker.check_model(folder / File.PREFILL)


def _signed_columns(graph: ir.Graph, integers: ir.Value, name: str, columns: int) -> list[ir.Node]:
    """Return the nodes that turn the decoder's bytes into signed ones, (columns, rows).

    ONNX Runtime folds them into a constant when it opens the graph.
    """
    stored = integers.const_value
    assert isinstance(stored, ir.ExternalTensor)
    rows, *blocks = (int(size) for size in stored.shape.numpy())
    width = int(np.prod(blocks))
    alias = initializer(graph, same_bytes(stored, f"{name}.bytes", dtype=ir.DataType.INT8, shape=(rows, width)))
    flip = ir.node("BitwiseXor", [alias, constant(graph, "ortgpt.flip", _FLIP)])
    nodes = [flip, ir.node("Transpose", [flip.outputs[0]], {"perm": [1, 0]})]
    if columns != width:
        nodes.append(first_columns(graph, nodes[-1].outputs[0], columns, axis=0))
    nodes[-1].outputs[0].shape, nodes[-1].outputs[0].type = ir.Shape((columns, rows)), alias.type
    return nodes


def _flat(graph: ir.Graph, scales: ir.Value) -> ir.Value:
    """Return the decoder's scales of rows, (rows, 1), as (rows,)."""
    stored, name = scales.const_value, f"{scales.name}.flat"
    assert stored is not None
    if not isinstance(stored, ir.ExternalTensor):  # onnx_ir keeps small tensors in the graph's own file
        return constant(graph, name, stored.numpy().reshape(-1))
    return initializer(graph, same_bytes(stored, name, shape=(stored.size,)))
