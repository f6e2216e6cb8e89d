"""The weights and constants of a graph: add one, or a second view of the bytes of one. Knows no node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Return a new initializer that holds `tensor`, by its name."""
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """Return an initializer of this name, made of `array` unless it is there."""
    if name not in graph.initializers:
        return initializer(graph, ir.tensor(array, name=name))
    return graph.initializers[name]


def same_bytes(
    stored: ir.ExternalTensor,
    name: str,
    *,
    dtype: ir.DataType | None = None,
    shape: Sequence[int],
    begin: int = 0,
    nbytes: int | None = None,
) -> ir.ExternalTensor:
    """Return a tensor of another shape or type over the bytes of one in a file of weights, or over some of them."""
    return ir.ExternalTensor(
        stored.location,
        (stored.offset or 0) + begin,
        stored.nbytes if nbytes is None else nbytes,
        stored.dtype if dtype is None else dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=stored.base_dir,
    )
