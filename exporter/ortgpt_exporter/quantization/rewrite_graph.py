"""Turn the weights of a float32 graph into integers, in place, by a recipe. Knows no files and no text.

Every matrix product becomes one that rounds its activations to 8 bits, with scales that no row of a batch shares with
another row. `integer_nodes` makes the nodes; `blocks` and `gptq` round the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortgpt.contract import DType
from ortgpt_exporter.quantization.blocks import Blocks, quantize_blocks
from ortgpt_exporter.quantization.gptq import quantize_gptq
from ortgpt_exporter.quantization.hessians import Hessian
from ortgpt_exporter.quantization.integer_nodes import LOOK_UPS, PRODUCTS, is_transposed
from ortgpt_exporter.quantization.recipe import EMBEDDING, LABEL_HEADS, POSITIONS, Recipe, Rounding
from ortgpt_exporter.quantization.smoothquant import smooth

# In 8 bits activations are rounded as coarsely as weights, and smoothing all channels halves the loss. In 4 bits nearly
# all of the loss comes from the weights, and smoothing pays for odd channels only.
_MIN_FACTORS = {DType.INT8: 1.0, DType.INT4: 4.0}
# The first opset, with its IR version, in which QuantizeLinear and DequantizeLinear know blocks and 4 bits.
_OPSET, _IR_VERSION = 21, 10

_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")

FindHessian = Callable[[str], Hessian]


@dataclass(kw_only=True)
class Report:
    """What became of the matrices of a graph."""

    quantized: dict[str, int] = field(default_factory=dict)
    """How many matrices have each dtype; one that is stored for look-ups and again for products counts twice."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The products that stayed in float32, each with the reason."""
    errors: dict[str, float] = field(default_factory=dict)
    """The root mean square of what rounding changed, relative to that of the matrix, by name."""
    parameters: int = 0
    """How many parameters the whole network has."""


@dataclass(frozen=True)
class RoundedMatrix:
    """A rounded matrix, and what rounding changed."""

    blocks: Blocks
    """The integers, packed."""
    error: float
    """As in Report.errors."""


RoundedMatrices = MutableMapping[tuple[str, Rounding], RoundedMatrix]


def expected_matrices(n_layer: int) -> set[str]:
    """Return the names of the matrices that a network has."""
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return {EMBEDDING, POSITIONS, *(f"h.{layer}.{name}.weight" for layer in range(n_layer) for name in layers)}


def matrix_widths(model: ir.Model) -> dict[str, int]:
    """Return the length of the rows that blocks lie along, for each matrix by name."""
    weights = model.graph.initializers
    widths = {}
    for node in model.graph:
        name = matrix_of(node)
        if name is not None:
            shape = weights[name].shape
            assert shape is not None
            widths[name] = int(shape.numpy()[1 if is_transposed(node) else 0])
    return widths


def product_inputs(model: ir.Model) -> dict[str, ir.Value]:
    """Return the activations that each matrix multiplies, by the matrix's name, in the graph's order."""
    products = ((matrix_of(node), node) for node in model.graph if not _is_look_up(node))
    return {name: node.inputs[0] for name, node in products if name is not None and node.inputs[0] is not None}


def parameter_count(model: ir.Model) -> int:
    """Return how many numbers the weights of a graph are."""
    return sum(value.const_value.size for value in model.graph.initializers.values() if value.const_value)


def unweighted_products(model: ir.Model) -> dict[str, str]:
    """Return the products that are not quantised, by the names of their nodes or of a classifier's head, and why."""
    nodes = (node for node in model.graph if node.op_type in _PRODUCTS and matrix_of(node) is None)
    heads = {node: _label_head(node) for node in nodes}
    return {
        head or str(node.name): "is small" if head else "multiplies two activations" for node, head in heads.items()
    }


def smooth_graph(model: ir.Model, dtype: str, *, n_layer: int, norm: str) -> None:
    """Move magnitude between activations and weights, in place, so that both survive rounding (see `smooth`)."""
    initializers = model.graph.initializers
    names = (EMBEDDING, POSITIONS)
    before = {name: _array(value) for name, value in initializers.items() if name.startswith("h.") or name in names}
    weights = dict(before)
    smooth(weights, n_layer=n_layer, norm=norm, min_factor=_MIN_FACTORS[dtype])
    for name, array in weights.items():
        if array is not before[name]:
            initializers[name].const_value = ir.tensor(array, name=name)


def needs_hessian(model: ir.Model, recipe: Recipe, rounded: RoundedMatrices) -> set[str]:
    """Return the names of the matrices that GPTQ is yet to round."""
    roundings = {name: recipe.rounding_of(name, look_up=False) for name in product_inputs(model)}
    return {name for name, rounding in roundings.items() if rounding.gptq and (name, rounding) not in rounded}


def quantize_graph(
    model: ir.Model,
    recipe: Recipe,
    hessian_of: FindHessian | None = None,
    *,
    rounded: RoundedMatrices | None = None,
) -> Report:
    """Quantise a smoothed float32 graph, in place, and report what became of its matrices.

    `hessian_of` gives the Hessian of a matrix, which GPTQ needs. A matrix that is in `rounded` is not rounded again,
    and every other is added to it. Without `rounded`, no matrix stays in memory.
    """
    initializers = model.graph.initializers
    report = Report(parameters=parameter_count(model), left_out=unweighted_products(model))
    matrices: RoundedMatrices = {} if rounded is None else rounded
    multiplied = product_inputs(model).keys()
    reported: set[tuple[str, Rounding]] = set()
    for node in list(model.graph):
        name = matrix_of(node)
        if name is None:
            continue
        rounding = recipe.rounding_of(name, look_up=_is_look_up(node), multiplied=name in multiplied)
        key = name, rounding
        if key not in matrices:
            matrix = _array(initializers[name])
            matrices[key] = _round(matrix if is_transposed(node) else matrix.T, rounding, name, hessian_of)
        if key not in reported:  # look-up and head may share one
            reported.add(key)
            _report(report, name, matrices[key])
        make = LOOK_UPS[recipe.flavour] if _is_look_up(node) else PRODUCTS[recipe.flavour, rounding.block_size is None]
        replace_node(model.graph, node, make(model.graph, node, name, matrices[key].blocks))
        if not initializers[name].uses():
            del initializers[name]  # the float32 matrices of a large model need not all be in memory at once
            if rounded is None:
                matrices = {other: matrix for other, matrix in matrices.items() if other[0] != name}
    raise_versions(model)
    return report


def matrix_of(node: ir.Node) -> str | None:
    """Return the name of the weight matrix that a node multiplies by or looks up in, if there is one."""
    place = 0 if node.op_type == "Gather" else 1 if node.op_type in _PRODUCTS else None
    value = None if place is None else node.inputs[place]
    if value is None or not value.is_initializer() or value.shape is None or len(value.shape) != 2:
        return None
    return None if _label_head(node) else value.name


def _label_head(node: ir.Node) -> str | None:
    """Return the weight of a node that is the head of a classifier, which has few rows and stays as it is."""
    return next((value.name for value in node.inputs if value is not None and value.name in LABEL_HEADS), None)


def _is_look_up(node: ir.Node) -> bool:
    return node.op_type == "Gather"


def _report(report: Report, name: str, matrix: RoundedMatrix) -> None:
    dtype = f"int{matrix.blocks.bits}"
    report.errors[name] = matrix.error
    report.quantized[dtype] = report.quantized.get(dtype, 0) + 1


def _round(
    matrix: npt.NDArray[np.float32], rounding: Rounding, name: str, hessian_of: FindHessian | None
) -> RoundedMatrix:
    """Round a matrix (rows, columns) whose blocks lie along its rows."""
    block_size = rounding.block_size or matrix.shape[1]
    if rounding.gptq:
        assert hessian_of is not None
        blocks = quantize_gptq(matrix, hessian_of(name), bits=rounding.bits, block_size=block_size)
    else:
        blocks = quantize_blocks(matrix, bits=rounding.bits, block_size=block_size)
    size = float(np.linalg.norm(matrix.astype(np.float64)))
    change = float(np.linalg.norm(blocks.dequantized().astype(np.float64) - matrix))
    return RoundedMatrix(blocks, change / size if size else 0.0)


def replace_node(graph: ir.Graph, node: ir.Node, nodes: list[ir.Node]) -> None:
    """Put `nodes` in place of a node; the last of them gets its name and result."""
    last = nodes[-1]
    last.name = node.name
    last.outputs[0].shape, last.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [node.outputs[0]], [last.outputs[0]])


def raise_versions(model: ir.Model) -> None:
    """Declare the opset that knows blocks, if the graph uses them."""
    blocked = {"QuantizeLinear", "DequantizeLinear"}
    if any(node.op_type in blocked and node.domain == "" for node in model.graph):
        model.opset_imports[""] = max(model.opset_imports[""], _OPSET)
        model.ir_version = max(model.ir_version, _IR_VERSION)


def _array(value: ir.Value) -> npt.NDArray[np.float32]:
    assert value.const_value is not None
    return value.const_value.numpy()
