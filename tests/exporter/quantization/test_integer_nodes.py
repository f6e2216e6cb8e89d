"""Each kind of node that computes with integers, against the same arithmetic in numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortgpt_exporter.graph.initializers import constant
from ortgpt_exporter.quantization.blocks import quantize_blocks
from ortgpt_exporter.quantization.recipe import Recipe, make_recipe
from ortgpt_exporter.quantization.request import Quantization
from ortgpt_exporter.quantization.rewrite_graph import quantize_graph

RNG = np.random.default_rng(0)
WIDTH, OUT = 64, 48
LAYER, HEAD = "h.0.mlp.c_fc.weight", "wte.weight"


def graph_of(op: str, name: str, weight: Any, domain: str = "") -> ir.Model:
    """Return a graph y = op(x, weight), or op(weight, x) for a look-up."""
    rank = 2 if op == "Gemm" else 3
    kind = ir.DataType.INT64 if op == "Gather" else ir.DataType.FLOAT
    shape = ir.Shape([None] * (2 if op == "Gather" else rank - 1) + ([] if op == "Gather" else [WIDTH]))
    x = ir.Value(name="x", type=ir.TensorType(kind), shape=shape)
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18, "com.microsoft": 1}, name="g")
    value = constant(graph, name, weight)
    attributes = {} if op in ("MatMul", "Gather") else {"transB": 1}
    node = ir.node(op, [value, x] if op == "Gather" else [x, value], attributes, domain=domain)
    node.outputs[0].name = "y"
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    return ir.Model(graph, ir_version=9)


def run(model: ir.Model, x: Any) -> Any:
    """Run without graph optimisations, so that no node is fused with another."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def recipe(flavour: str, dtype: str, **choices: Any) -> Recipe:
    return make_recipe(Quantization(dtype=dtype, **choices), {LAYER: WIDTH}, flavour=flavour)


def rounded_product(x: Any, table: Any) -> Any:
    """Round rows of x to bytes with one scale each, multiply in integers, and scale back."""
    blocks = quantize_blocks(table, bits=8, block_size=WIDTH)
    scale = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
    integers = np.round(x / np.where(scale == 0, 1, scale)).astype(np.int64)
    product = integers @ (blocks.integers[:, 0].astype(np.int64) - 128).T
    return product * scale.astype(np.float64) * blocks.scales[:, 0]


def activations(rank: int) -> Any:
    x = RNG.normal(size=(2, 3, WIDTH)).astype(np.float32)
    x[0, 1] *= 1000  # a row far from the others
    x[1, 2] = 0
    return x if rank == 3 else x.reshape(6, WIDTH)


@pytest.mark.parametrize("flavour", ["native", "portable"])
def test_products_by_rows_are_the_integers_own(flavour: str) -> None:
    weight = RNG.normal(size=(WIDTH, OUT)).astype(np.float32)
    model = graph_of("MatMul", LAYER, weight)
    report = quantize_graph(model, recipe(flavour, "int8", method="w8a8"))
    assert (report.quantized, report.left_out) == ({"int8": 1}, {})
    x = activations(3)
    found, expected = run(model, x), rounded_product(x, weight.T)
    assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max()
    assert not found[1, 2].any()
    assert np.array_equal(found[0, :1], run(model, x[:1, :1])[0])  # whatever is beside a row, it stays the same


def test_the_portable_head_and_look_up_share_one_table() -> None:
    table = RNG.normal(size=(OUT, WIDTH)).astype(np.float32)
    model = graph_of("Gemm", HEAD, table)
    quantize_graph(model, recipe("portable", "int8"))
    x = activations(2)
    expected = rounded_product(x, table)
    assert np.abs(run(model, x) - expected).max() <= 2e-6 * np.abs(expected).max()
    look_up = graph_of("Gather", HEAD, table)
    quantize_graph(look_up, recipe("portable", "int8"))
    ids = np.array([[3, 0], [47, 3]])
    blocks = quantize_blocks(table, bits=8, block_size=WIDTH)
    assert np.array_equal(run(look_up, ids), blocks.dequantized()[ids])
    head, looked_up = (each.graph.initializers[f"{HEAD}.int8"].const_value for each in (model, look_up))
    assert head is not None
    assert looked_up is not None
    assert np.array_equal(head.numpy(), looked_up.numpy())


def test_portable_blocks_are_widened_to_the_weights_that_they_represent() -> None:
    weight = RNG.normal(size=(WIDTH, OUT)).astype(np.float32)
    weight[:, 7] = 3.0  # blocks of one value
    in_blocks = recipe("portable", "int4", block_size=16)
    for op, name, matrix in (("MatMul", LAYER, weight), ("Gemm", HEAD, weight.T.copy())):
        model = graph_of(op, name, matrix)
        quantize_graph(model, in_blocks)
        blocks = quantize_blocks(weight.T, bits=4, block_size=16)
        x = activations(2 if op == "Gemm" else 3)
        expected = x @ blocks.dequantized().T
        assert np.abs(run(model, x) - expected).max() <= 1e-5 * np.abs(expected).max()
        assert model.opset_imports[""] == 21
        assert {node.op_type for node in model.graph} == {"DequantizeLinear", "MatMul"}


def test_a_portable_head_in_8_bits_is_multiplied_by_rows_like_its_look_up() -> None:
    mixed = replace(recipe("portable", "int4", block_size=16, head_dtype="int8"), wider=(LAYER,))
    assert mixed.rounding_of(HEAD, look_up=False) == mixed.rounding_of(HEAD, look_up=True)
    assert mixed.rounding_of(LAYER, look_up=False).block_size is None
    table = RNG.normal(size=(OUT, WIDTH)).astype(np.float32)
    model = graph_of("Gemm", HEAD, table)
    quantize_graph(model, mixed)
    x = activations(2)
    expected = rounded_product(x, table)
    assert np.abs(run(model, x) - expected).max() <= 2e-6 * np.abs(expected).max()


def test_onnx_runtime_fuses_portable_blocks_into_its_own_operator(tmp_path: Path) -> None:
    """The bundle is then as fast as a native one, and no float32 copy of the weights is in memory."""
    model = graph_of("MatMul", LAYER, RNG.normal(size=(WIDTH, OUT)).astype(np.float32))
    quantize_graph(model, recipe("portable", "int4"))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert [node.op_type for node in ir.load(tmp_path / "fused.onnx").graph] == ["MatMulNBits"]
