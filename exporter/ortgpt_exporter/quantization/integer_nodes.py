"""Make the nodes that compute with a matrix of integers, for each flavour of graph. Knows no recipe and rounds nothing.

Each function gets a node that multiplies by a weight, or looks rows up in it, and returns the nodes that do the same
with integers. The last of them replaces the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortgpt.contract import Flavour
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.graph.initializers import constant
from ortgpt_exporter.graph.torch_modules import MICROSOFT
from ortgpt_exporter.quantization.blocks import Blocks

MakeNodes = Callable[[ir.Graph, ir.Node, str, Blocks], list[ir.Node]]

_ACCURACY_LEVEL = 4  # compute in int8: twice as fast as the default, which widens the weights
_ZERO = 128  # the byte for zero in activations; the fast kernel takes unsigned bytes only
# A GELU never returns less than the negative of this, so fewer bytes are needed for negative values.
_GELUS, _GELU_MIN = ("Gelu", "FastGelu"), 0.1701
_GELU_ZERO = 32
_FLOAT = ir.DataType.FLOAT


def nbits_matmul(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> list[ir.Node]:
    """Multiply by integers in blocks; activations are rounded to 8 bits, block by block."""
    rows, count, width = blocks.packed.shape
    is_table = is_transposed(node)  # stored in the shape of a look-up, which reads the same tensors if the head is tied
    stored, before = _stored(graph, name, blocks, flat=not is_table), []
    if is_table:
        shape = constant(graph, f"{name}.shape", np.array([rows, count, width]))
        flat = constant(graph, "ortgpt.flat", np.array([-1]))
        before = [ir.node("Reshape", [value, flat if place else shape]) for place, value in enumerate(stored)]
        stored = [reshape.outputs[0] for reshape in before]
    attributes = {
        "K": blocks.columns,
        "N": rows,
        "bits": blocks.bits,
        "block_size": blocks.block_size,
        "accuracy_level": _ACCURACY_LEVEL,
    }
    return [*before, ir.node("MatMulNBits", [node.inputs[0], *stored], attributes, domain=MICROSOFT)]


def nbits_gather(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> list[ir.Node]:
    """Look up rows of integers in blocks."""
    integers, scales = _stored(graph, name, blocks, flat=False)
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": blocks.block_size, "bits": blocks.bits}
    rows = ir.node("GatherBlockQuantized", [integers, node.inputs[1], scales], attributes, domain=MICROSOFT)
    if blocks.columns == blocks.scales.shape[1] * blocks.block_size:
        return [rows]
    return [rows, first_columns(graph, rows.outputs[0], blocks.columns, axis=-1)]


def first_columns(graph: ir.Graph, value: ir.Value, count: int, *, axis: int) -> ir.Node:
    """Return the node that takes the first `count` along an axis, without the padding of the last block."""
    names = {"ortgpt.first": 0, f"ortgpt.columns.{count}": count, f"ortgpt.axis.{axis}": axis}
    return ir.node("Slice", [value, *(constant(graph, name, np.array([number])) for name, number in names.items())])


def _stored(graph: ir.Graph, name: str, blocks: Blocks, *, flat: bool) -> list[ir.Value]:
    """Return integers and scales as initializers, made once per matrix.

    With `flat` they have the shapes that MatMulNBits takes, (rows, blocks, bytes) and one axis, otherwise (rows, …).
    """
    packed, scales = blocks.packed, blocks.scales
    return [
        constant(graph, f"{name}.int{blocks.bits}", packed if flat else packed.reshape(len(packed), -1)),
        constant(graph, f"{name}.scales", scales.reshape(-1) if flat else scales),
    ]


def dequantized_matmul(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> list[ir.Node]:
    """Multiply by the output of a DequantizeLinear of 4-bit integers (opset 21).

    ONNX Runtime fuses the two into one MatMulNBits.
    """
    columns = blocks.integers.reshape(len(blocks.packed), -1)[:, : blocks.columns].T  # (in, out), as MatMul takes it
    weights = [
        constant(graph, f"{name}.int4", (columns.astype(np.int8) - 8).astype(ml_dtypes.int4)),
        constant(graph, f"{name}.scales", np.ascontiguousarray(blocks.scales.T)),
    ]
    widened = ir.node("DequantizeLinear", weights, {"axis": 0, "block_size": blocks.block_size})
    return [widened, ir.node("MatMul", [node.inputs[0], widened.outputs[0]])]


def rows_matmul(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> list[ir.Node]:
    """Multiply 8-bit activations, one scale per row, by 8-bit weights, one scale per column; standard operators."""
    per_node = is_transposed(node)
    nodes, rounded, row_scales, zero = _rounded_rows(graph, node.inputs[0], blocks.block_size, per_node=per_node)
    weights, scales = signed_rows(graph, name, blocks, transposed=not is_transposed(node))
    if is_transposed(node):  # the look-up reads the same tensors if the head is tied
        nodes.append(ir.node("Transpose", [weights], {"perm": [1, 0]}))
        weights = nodes[-1].outputs[0]
        nodes.append(ir.node("Reshape", [scales, constant(graph, "ortgpt.flat", np.array([-1]))]))
        scales = nodes[-1].outputs[0]
    product = ir.node("MatMulInteger", [rounded, weights, zero])
    widened = ir.node("Cast", [product.outputs[0]], {"to": _FLOAT})
    by_row = ir.node("Mul", [widened.outputs[0], row_scales])
    return [*nodes, product, widened, by_row, ir.node("Mul", [by_row.outputs[0], scales])]


def fused_rows_matmul(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> list[ir.Node]:
    """As rows_matmul(), with the weights' scales applied within the product."""
    weights, scales = signed_rows(graph, name, blocks, transposed=True)
    return fused_rows_product(graph, node.inputs[0], weights, scales)


def fused_rows_product(graph: ir.Graph, x: ir.Value | None, weights: ir.Value, scales: ir.Value) -> list[ir.Node]:
    """Multiply rows of activations, rounded to 8 bits, by signed bytes (width, columns), with one scale per column."""
    assert weights.shape is not None
    width = int(weights.shape.numpy()[0])
    nodes, rounded, row_scales, zero = _rounded_rows(graph, x, width, per_node=False)
    one = constant(graph, "ortgpt.one", np.array(1, np.float32))
    product = ir.node("MatMulIntegerToFloat", [rounded, weights, one, scales, zero], domain=MICROSOFT)
    return [*nodes, product, ir.node("Mul", [product.outputs[0], row_scales])]


def rows_gather(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> list[ir.Node]:
    """Look up rows of 8-bit integers, one scale per row."""
    table, scales = signed_rows(graph, name, blocks, transposed=False)
    rows, row_scales = (ir.node("Gather", [value, node.inputs[1]]) for value in (table, scales))
    widened = ir.node("Cast", [rows.outputs[0]], {"to": _FLOAT})
    return [rows, row_scales, widened, ir.node("Mul", [widened.outputs[0], row_scales.outputs[0]])]


def _rounded_rows(
    graph: ir.Graph, x: ir.Value | None, width: int, *, per_node: bool
) -> tuple[list[ir.Node], ir.Value, ir.Value, ir.Value]:
    """Return the nodes that round each row of `x` to bytes, the bytes, the scale of each row, and the byte for zero.

    A row of zeros has the scale 0: whatever its bytes are, its products are 0.
    """
    last = constant(graph, "ortgpt.last", np.array([-1]))
    nodes: list[ir.Node] = []
    producer = None if x is None else x.producer()
    if producer is not None and producer.op_type in _GELUS:
        zero = _GELU_ZERO
        largest = ir.node("ReduceMax", [x, last], {"keepdims": 1})
        floor = constant(graph, "ortgpt.gelu_floor", np.array(_GELU_MIN * (255 - zero) / zero, np.float32))
        nodes += [largest, ir.node("Max", [largest.outputs[0], floor])]
    else:
        zero = _ZERO
        magnitude = ir.node("Abs", [x])
        nodes += [magnitude, ir.node("ReduceMax", [magnitude.outputs[0], last], {"keepdims": 1})]
    step = constant(graph, f"ortgpt.step.{zero}", np.array(1 / (255 - zero), np.float32))
    scales = ir.node("Mul", [nodes[-1].outputs[0], step])
    nodes.append(scales)
    point = constant(graph, f"ortgpt.zero.{zero}", np.array(zero, np.uint8))
    name = f"ortgpt.zeros_of_rows.{_rows(x)}.{zero}"
    zeros = None if per_node else next((value for node in graph for value in node.outputs if value.name == name), None)
    if zeros is None:
        shape = ir.node("Shape", [scales.outputs[0]])
        expand = ir.node("Expand", [point, shape.outputs[0]])
        nodes += [shape, expand]
        zeros = expand.outputs[0]
        if not per_node:
            zeros.name = name
    bytes_ = ir.node("QuantizeLinear", [x, scales.outputs[0], zeros], {"axis": -1, "block_size": width})
    return [*nodes, bytes_], bytes_.outputs[0], scales.outputs[0], point


def _rows(x: ir.Value | None) -> str:
    """Return the name of the axis of positions; activations with the same one have equally many rows."""
    if x is None or x.shape is None:
        raise ExportError(f"the graph does not state the shape of {'an input' if x is None else x.name}")
    return str(x.shape[1])


def signed_rows(graph: ir.Graph, name: str, blocks: Blocks, *, transposed: bool) -> tuple[ir.Value, ir.Value]:
    """Return whole rows of integers as signed bytes, (rows, width), and scales, (rows, 1).

    If `transposed`, their shapes are (width, rows) and (rows,).
    """
    table = (blocks.packed[:, 0].astype(np.int16) - 128).astype(np.int8)
    scales = blocks.scales.reshape(-1) if transposed else blocks.scales
    return (
        constant(graph, f"{name}.int8", np.ascontiguousarray(table.T) if transposed else table),
        constant(graph, f"{name}.int8_scales", scales),
    )


def is_transposed(node: ir.Node) -> bool:
    """Tell whether a node's matrix is (out, in), like embedding and head; a layer's is (in, out)."""
    return node.op_type == "Gather" or node.attributes.get_int("transB", 0) == 1


# By flavour, and whether each row of the matrix has one scale.
PRODUCTS: Mapping[tuple[str, bool], MakeNodes] = {
    (Flavour.NATIVE, False): nbits_matmul,
    (Flavour.NATIVE, True): fused_rows_matmul,
    (Flavour.PORTABLE, False): dequantized_matmul,
    (Flavour.PORTABLE, True): rows_matmul,
}
LOOK_UPS: Mapping[str, MakeNodes] = {Flavour.NATIVE: nbits_gather, Flavour.PORTABLE: rows_gather}
