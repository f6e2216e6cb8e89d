"""Turn the weights of a float32 graph into integers, in place, by a recipe. Knows no files and no text.

Every matrix product becomes one that rounds its activations to 8 bits, with scales that no row of a batch shares with
another. What the nodes are is `integer_nodes`'s, how a matrix is rounded `blocks`'s and `gptq`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortgpt.contract import DType
from ortgpt_exporter.quantization.blocks import Blocks, quantize_blocks
from ortgpt_exporter.quantization.gptq import quantize_gptq
from ortgpt_exporter.quantization.hessians import Hessian
from ortgpt_exporter.quantization.integer_nodes import LOOK_UPS, PRODUCTS, is_transposed
from ortgpt_exporter.quantization.recipe import EMBEDDING, GPTQ, POSITIONS, Recipe, Rounding
from ortgpt_exporter.quantization.smoothquant import smooth

# Smoothing all channels halves the loss of 8 bits, where activations are rounded as coarsely as weights. In 4 bits the
# weights' loss is all, and it pays for odd channels only.
_LEAST_FACTORS = {DType.INT8: 1.0, DType.INT4: 4.0}
# The first opset, with its IR version, in which QuantizeLinear and DequantizeLinear know blocks, and 4 bits.
_OPSET, _IR_VERSION = 21, 10

_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")

FindHessian = Callable[[str], Hessian]


@dataclass(kw_only=True)
class Report:
    """What became of the matrices: how many have how many bits, which were left as they are, and each one's error.

    A matrix that is stored once for look-ups and once for products counts twice. `parameters` counts those of the whole
    network. An error is the root mean square of what rounding changed, relative to that of the matrix.
    """

    quantized: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    parameters: int = 0


def expected_matrices(n_layer: int) -> set[str]:
    """Return the names of the matrices that a network has."""
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return {EMBEDDING, POSITIONS, *(f"h.{layer}.{name}.weight" for layer in range(n_layer) for name in layers)}


def matrix_widths(model: ir.Model) -> dict[str, int]:
    """Return the length of the rows that blocks lie along, for each matrix by name."""
    weights = model.graph.initializers
    found = {}
    for node in model.graph:
        matrix = matrix_of(node)
        if matrix is not None:
            shape = weights[matrix].shape
            assert shape is not None
            found[matrix] = int(shape.numpy()[1 if is_transposed(node) else 0])
    return found


def product_inputs(model: ir.Model) -> dict[str, ir.Value]:
    """Return what is multiplied by each matrix, by its name, in the graph's order."""
    products = ((matrix_of(node), node) for node in model.graph if not _is_look_up(node))
    return {name: node.inputs[0] for name, node in products if name is not None and node.inputs[0] is not None}


def parameter_count(model: ir.Model) -> int:
    """Return how many numbers the weights of a graph are."""
    return sum(value.const_value.size for value in model.graph.initializers.values() if value.const_value)


def unweighted_products(model: ir.Model) -> dict[str, str]:
    """Return the products of two activations, by the names of their nodes, and why they stay as they are."""
    nodes = (node for node in model.graph if node.op_type in _PRODUCTS and matrix_of(node) is None)
    return {str(node.name): "multiplies two activations" for node in nodes}


def balance(model: ir.Model, dtype: str, *, n_layer: int) -> None:
    """Move magnitude between activations and weights, in place, so that both survive rounding (see `smooth`)."""
    initializers = model.graph.initializers
    weights = {name: _array(value) for name, value in initializers.items() if name.startswith("h.")}
    smooth(weights, n_layer=n_layer, least_factor=_LEAST_FACTORS[dtype])
    for name, array in weights.items():
        initializers[name].const_value = ir.tensor(array, name=name)


def quantize_graph(model: ir.Model, recipe: Recipe, hessian_of: FindHessian | None = None) -> Report:
    """Quantise a float32 graph, already balanced, in place, and report what became of its matrices.

    `hessian_of` gives what GPTQ wants to know of a matrix.
    """
    initializers = model.graph.initializers
    report = Report(parameters=parameter_count(model), kept=unweighted_products(model))
    made: dict[tuple[str, Rounding], Blocks] = {}
    for node in list(model.graph):
        name = matrix_of(node)
        if name is None:
            continue
        rounding = recipe.rounding_of(name, look_up=_is_look_up(node))
        if (name, rounding) not in made:  # look-up and head may share one
            matrix = _array(initializers[name])
            matrix = matrix if is_transposed(node) else matrix.T
            blocks = made[name, rounding] = _round(matrix, rounding, name, hessian_of)
            report.errors[name] = _relative_error(matrix, blocks)
            kind = f"int{blocks.bits}"
            report.quantized[kind] = report.quantized.get(kind, 0) + 1
        by_rows = rounding.block_size is None
        make = LOOK_UPS[recipe.flavour] if _is_look_up(node) else PRODUCTS[recipe.flavour, by_rows]
        replace_node(model.graph, node, make(model.graph, node, name, made[name, rounding]))
        if not initializers[name].uses():
            del initializers[name]  # a large model's matrices need not all be there at once
            made = {key: blocks for key, blocks in made.items() if key[0] != name}
    raise_versions(model)
    return report


def matrix_of(node: ir.Node) -> str | None:
    """Return the name of the weight matrix that a node multiplies by or looks up in, if it does."""
    place = 0 if node.op_type == "Gather" else 1 if node.op_type in _PRODUCTS else None
    value = None if place is None else node.inputs[place]
    if value is None or not value.is_initializer() or value.shape is None or len(value.shape) != 2:
        return None
    return value.name


def _is_look_up(node: ir.Node) -> bool:
    return node.op_type == "Gather"


def _round(matrix: npt.NDArray[np.float32], rounding: Rounding, name: str, hessian_of: FindHessian | None) -> Blocks:
    width = matrix.shape[1]
    if rounding.row_scales:
        whole = quantize_blocks(matrix, bits=rounding.bits, block_size=width, method=rounding.method)
        return whole.split(rounding.block_size or width)
    block_size = rounding.block_size or width
    if rounding.method != GPTQ:
        return quantize_blocks(matrix, bits=rounding.bits, block_size=block_size, method=rounding.method)
    assert hessian_of is not None
    return quantize_gptq(matrix, hessian_of(name), bits=rounding.bits, block_size=block_size)


def replace_node(graph: ir.Graph, node: ir.Node, nodes: list[ir.Node]) -> None:
    """Put `nodes` in place of a node, the last of them with its name and result."""
    new = nodes[-1]
    new.name = node.name
    new.outputs[0].shape, new.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [node.outputs[0]], [new.outputs[0]])


def raise_versions(model: ir.Model) -> None:
    """Declare the opset of blocks, where they are used."""
    blocked = {"QuantizeLinear", "DequantizeLinear"}
    if any(node.op_type in blocked and node.domain == "" for node in model.graph):
        model.opset_imports[""] = max(model.opset_imports[""], _OPSET)
        model.ir_version = max(model.ir_version, _IR_VERSION)


def _array(value: ir.Value) -> npt.NDArray[np.float32]:
    assert value.const_value is not None
    return value.const_value.numpy()


def _relative_error(matrix: npt.NDArray[np.float32], blocks: Blocks) -> float:
    size = float(np.linalg.norm(matrix.astype(np.float64)))
    return float(np.linalg.norm(blocks.dequantized().astype(np.float64) - matrix)) / size if size else 0.0
