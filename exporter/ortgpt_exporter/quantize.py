"""Turn the weights of a float32 graph into blocks of integers, on the operators that ONNX Runtime computes them with.

Every matrix product becomes a MatMulNBits, which rounds its activations to 8 bits block by block, so that no row of a
batch shares a scale with another. The token embedding stays one tensor for look-up and head. Knows no files and no
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortgpt.contract import DType, Key
from ortgpt_exporter.blocks import METHODS, Blocks, quantize_blocks
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.graphs import MICROSOFT
from ortgpt_exporter.smooth import smooth

BITS = {DType.INT8: 8, DType.INT4: 4}
BLOCK_SIZES = (128, 64, 32, 16)
EMBEDDING, POSITIONS = "wte.weight", "wpe.weight"
_ACCURACY_LEVEL = 4  # compute in int8: twice as fast as the default, which widens the weights
# Smoothing all channels halves the loss of 8 bits, where activations are rounded as coarsely as weights. In 4 bits the
# weights' loss is all, and it pays for odd channels only.
_LEAST_FACTORS = {DType.INT8: 1.0, DType.INT4: 4.0}
_POSITION_BITS = 8  # few rows, and each is added to every token


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How weights become integers. The embedding, which is the head, has blocks and bits of its own.

    `wider` names matrices that get 8 bits although `dtype` is int4.
    """

    dtype: str
    method: str = "scale-search"
    block_size: int
    head_block_size: int
    head_dtype: str
    wider: tuple[str, ...] = ()

    def bits_of(self, name: str) -> int:
        """Return the bits of a matrix by its checkpoint's name."""
        if name == POSITIONS:
            return _POSITION_BITS
        if name == EMBEDDING:
            return BITS[self.head_dtype]
        return 8 if name in self.wider else BITS[self.dtype]

    def block_size_of(self, name: str) -> int:
        return self.head_block_size if name in (EMBEDDING, POSITIONS) else self.block_size


@dataclass(kw_only=True)
class Report:
    """What became of the matrices: how many have how many bits, which were left as they are, and each one's error.

    `parameters` counts those of the whole network. An error is the root mean square of what rounding changed, relative
    to that of the matrix.
    """

    quantized: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    parameters: int = 0


def make_recipe(
    widths: Mapping[str, int], *, dtype: str, method: str | None, block_size: int | None, head_dtype: str | None
) -> Recipe:
    """Return the recipe for matrices whose rows have these widths, by name; what is None is chosen.

    In 4 bits the head has blocks of 32, and all else of 128: most of the loss of 4 bits is the head's. Raises
    ExportError for a value that is not accepted, or a block size that does not divide every width.
    """
    faults = []
    for name, value, accepted in (
        (Key.DTYPE, dtype, BITS),
        ("method", method or "scale-search", METHODS),
        ("head_dtype", head_dtype or dtype, BITS),
    ):
        if value not in accepted:
            faults.append(f"{name} = {value!r} (accepted: {', '.join(accepted)})")
    fitting = [size for size in BLOCK_SIZES if all(width % size == 0 for width in widths.values())]
    if not fitting:
        widest = ", ".join(sorted({str(width) for width in widths.values()}))
        faults.append(f"the matrices are {widest} wide; blocks want multiples of {BLOCK_SIZES[-1]}")
    elif block_size is not None and block_size not in fitting:
        faults.append(f"block_size = {block_size!r} (accepted here: {', '.join(map(str, fitting))})")
    if faults:
        raise ExportError(f"this cannot be quantised: {'; '.join(faults)}")
    usual = block_size or fitting[0]
    head = head_dtype or dtype
    return Recipe(
        dtype=dtype,
        method=method or "scale-search",
        block_size=usual,
        head_block_size=min(usual, 32) if head == DType.INT4 and block_size is None else usual,
        head_dtype=head,
    )


def expected_matrices(n_layer: int) -> set[str]:
    """Return the names of the matrices that a network has."""
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return {EMBEDDING, POSITIONS, *(f"h.{layer}.{name}.weight" for layer in range(n_layer) for name in layers)}


def matrix_widths(model: ir.Model) -> dict[str, int]:
    """Return the length of the rows that blocks lie along, for each matrix by name."""
    weights = model.graph.initializers
    found = {}
    for node in model.graph:
        matrix = _matrix_of(node)
        if matrix is not None:
            shape = weights[matrix].shape
            assert shape is not None
            found[matrix] = int(shape.numpy()[1 if _is_transposed(node) else 0])
    return found


def quantize_graph(model: ir.Model, recipe: Recipe, *, n_layer: int) -> Report:
    """Quantise a native float32 graph in place, and report what became of its matrices."""
    initializers = model.graph.initializers
    report = Report(parameters=sum(value.const_value.size for value in initializers.values() if value.const_value))
    weights = {name: _array(value) for name, value in initializers.items() if name.startswith("h.")}
    smooth(weights, n_layer=n_layer, least_factor=_LEAST_FACTORS[recipe.dtype])
    for smoothed, array in weights.items():
        initializers[smoothed].const_value = ir.tensor(array, name=smoothed)
    blocks: dict[str, Blocks] = {}
    for node in list(model.graph):
        name = _matrix_of(node)
        if name is None:
            continue
        if name not in blocks:  # the embedding is met twice
            matrix = _array(initializers[name])
            matrix = matrix if _is_transposed(node) else matrix.T
            blocks[name] = quantize_blocks(
                matrix, bits=recipe.bits_of(name), block_size=recipe.block_size_of(name), method=recipe.method
            )
            report.errors[name] = _relative_error(matrix, blocks[name])
            kind = f"int{blocks[name].bits}"
            report.quantized[kind] = report.quantized.get(kind, 0) + 1
        make = _gather if node.op_type == "Gather" else _matmul
        _replace(model.graph, node, *make(model.graph, node, name, blocks[name]))
        if not initializers[name].uses():
            del initializers[name]  # a large model's matrices need not all be there at once
            blocks.pop(name)
    left = [str(node.name) for node in model.graph if node.op_type in ("MatMul", "FusedMatMul", "Gemm")]
    report.kept = dict.fromkeys(left, "its second factor is no weight")
    return report


def _matrix_of(node: ir.Node) -> str | None:
    """Return the name of the weight matrix that a node multiplies by or looks up in, if it does."""
    place = {"MatMul": 1, "FusedMatMul": 1, "Gather": 0}.get(node.op_type)
    value = None if place is None else node.inputs[place]
    if value is None or not value.is_initializer() or value.shape is None or len(value.shape) != 2:
        return None
    return value.name


def _is_transposed(node: ir.Node) -> bool:
    """Tell whether a node's matrix has its blocks along the second axis, as the embedding has."""
    return node.op_type in ("FusedMatMul", "Gather")


def _matmul(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> tuple[list[ir.Node], ir.Node]:
    quantized, scales, zero_points = _stored(graph, name, blocks)
    rows, count, width = blocks.packed().shape
    before = [
        ir.node("Reshape", [quantized, _constant(graph, f"{name}.shape", np.array([rows, count, width]))]),
        ir.node("Reshape", [scales, _constant(graph, "flat", np.array([-1]))]),
    ]
    inputs = [node.inputs[0], before[0].outputs[0], before[1].outputs[0]]
    if zero_points is not None:
        before.append(ir.node("Reshape", [zero_points, _constant(graph, "flat", np.array([-1]))]))
        inputs.append(before[-1].outputs[0])
    attributes = {
        "K": count * blocks.block_size,
        "N": rows,
        "bits": blocks.bits,
        "block_size": blocks.block_size,
        "accuracy_level": _ACCURACY_LEVEL,
    }
    return before, ir.node("MatMulNBits", inputs, attributes, domain=MICROSOFT)


def _gather(graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks) -> tuple[list[ir.Node], ir.Node]:
    quantized, scales, zero_points = _stored(graph, name, blocks)
    inputs = [quantized, node.inputs[1], scales, *([] if zero_points is None else [zero_points])]
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": blocks.block_size, "bits": blocks.bits}
    return [], ir.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT)


def _stored(graph: ir.Graph, name: str, blocks: Blocks) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Return integers (rows, bytes), scales and zero points as initializers, made once a matrix."""
    zero_points = blocks.packed_zero_points()
    return (
        _constant(graph, f"{name}.int{blocks.bits}", blocks.packed().reshape(len(blocks.scales), -1)),
        _constant(graph, f"{name}.scales", blocks.scales),
        None if zero_points is None else _constant(graph, f"{name}.zero_points", zero_points),
    )


def _constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        shape, kind = ir.Shape(array.shape), ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def _replace(graph: ir.Graph, node: ir.Node, before: list[ir.Node], new: ir.Node) -> None:
    new.name = node.name
    new.outputs[0].shape, new.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
    ir.convenience.replace_nodes_and_values(graph, node, [node], [*before, new], [node.outputs[0]], [new.outputs[0]])


def _array(value: ir.Value) -> npt.NDArray[np.float32]:
    assert value.const_value is not None
    return value.const_value.numpy()


def _relative_error(matrix: npt.NDArray[np.float32], blocks: Blocks) -> float:
    size = float(np.sqrt(np.square(matrix).mean()))
    return float(np.sqrt(np.square(blocks.dequantized() - matrix).mean())) / size if size else 0.0
