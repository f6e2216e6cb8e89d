"""Add weights and constants to a graph, or a second view of the bytes of a weight. Knows no node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor to a graph under its own name, and return its value."""
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """Return the initializer of this name; if there is none, add `array` as one."""
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
    """Return a tensor that reads a stored one's bytes, or `nbytes` of them from `begin`, as another shape or type."""
    return ir.ExternalTensor(
        stored.location,
        (stored.offset or 0) + begin,
        stored.nbytes if nbytes is None else nbytes,
        stored.dtype if dtype is None else dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=stored.base_dir,
    )
