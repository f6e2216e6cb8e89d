"""Rounding in blocks: the weights that the integers represent, against ONNX Runtime's kernel and the matrix."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpt_exporter.quantization.blocks import Blocks, quantize_blocks


def matrix(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(48, 96)).astype(np.float32)
    values[3, 5] = 9.0  # an outlier
    values[7] = 0.0
    values[8, :32] = -1.5  # a block of one value
    return values


def onnx_runtime_product(blocks: Blocks, x: Any) -> Any:
    """Multiply by MatMulNBits, with float32 activations."""
    rows, count, _ = blocks.packed.shape
    weights: dict[str, Any] = {"b": blocks.packed, "scales": blocks.scales.reshape(-1)}
    node = helper.make_node(
        "MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", K=count * blocks.block_size, N=rows,
        bits=blocks.bits, block_size=blocks.block_size, accuracy_level=1,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (len(x), rows))],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32])
def test_onnx_runtime_multiplies_by_the_weights_that_the_integers_represent(bits: int, block_size: int) -> None:
    blocks = quantize_blocks(matrix(), bits=bits, block_size=block_size)
    x = np.random.default_rng(1).normal(size=(5, 96)).astype(np.float32)
    assert np.abs(onnx_runtime_product(blocks, x) - x @ blocks.dequantized().T).max() < 2e-4
    # Rounding to nearest changes a weight by half a step at most. The search may change some weights more.
    error = np.abs(blocks.dequantized() - matrix())
    step = (matrix().max() - matrix().min()) / (2**bits - 1)
    assert error.max() <= 2.5 * step
    assert not blocks.dequantized()[7].any()


def test_the_search_beats_the_scale_that_just_fits() -> None:
    rows = np.random.default_rng(2).normal(size=(200, 32)).astype(np.float32)
    largest = rows[np.arange(200), np.abs(rows).argmax(1)][:, None]
    plain = np.clip(np.round(rows / (largest / -8)), -8, 7) * (largest / -8)
    found = quantize_blocks(rows, bits=4, block_size=32).dequantized()
    assert np.square(found - rows).sum() < 0.9 * np.square(plain - rows).sum()


def test_known_integers() -> None:
    row = np.array([[-8.0, 7.0, 3.0, 0.0] * 4], np.float32)
    blocks = quantize_blocks(row, bits=4, block_size=16)
    assert blocks.integers[0, 0, :4].tolist() == [0, 15, 11, 8]
    assert blocks.scales[0, 0] == pytest.approx(1.0)
    assert blocks.packed[0, 0, :2].tolist() == [15 << 4 | 0, 8 << 4 | 11]
    assert np.allclose(blocks.dequantized(), row, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_keeps_every_integer(bits: int) -> None:
    rng = np.random.default_rng(3)
    integers = rng.integers(2**bits, size=(5, 3, 32)).astype(np.uint8)
    blocks = Blocks.pack(integers, rng.uniform(1, 2, size=(5, 3)).astype(np.float32), bits=bits)
    assert blocks.packed.shape == (5, 3, 32 * bits // 8)
    assert np.array_equal(blocks.integers, integers)
    assert blocks.block_size == 32


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [17, 35, 40, 100])
def test_the_last_block_of_a_row_is_filled_with_zeros(bits: int, columns: int) -> None:
    rows = np.random.default_rng(5).normal(size=(6, columns)).astype(np.float32)
    whole = np.pad(rows, ((0, 0), (0, -columns % 32)))
    blocks, expected = (quantize_blocks(each, bits=bits, block_size=32) for each in (rows, whole))
    assert np.array_equal(blocks.packed, expected.packed)
    assert np.array_equal(blocks.dequantized(), expected.dequantized()[:, :columns])
    assert (blocks.integers.reshape(6, -1)[:, columns:] == 2 ** (bits - 1)).all()
    assert blocks.scales.shape == (6, -(-columns // 32))
    assert np.abs(blocks.dequantized() - rows).max() <= (0.02 if bits == 8 else 0.35)


def test_blocks_far_from_zero_are_not_lost() -> None:
    far = np.tile(np.linspace(3, 4, 16, dtype=np.float32), (4, 1)) * np.array([[1], [-1], [100], [-1e-3]], np.float32)
    found = quantize_blocks(far, bits=8, block_size=16).dequantized()
    assert np.abs(found / far - 1).max() < 0.02


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e25])
def test_weights_of_any_size_are_rounded_alike_and_without_a_warning(size: float) -> None:
    values = (matrix() * np.float32(size)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = quantize_blocks(values, bits=4, block_size=32).dequantized()
    assert np.isfinite(found).all()
    if size > 1e-40:  # below, numbers have few digits themselves
        error = np.linalg.norm((found - values).astype(np.float64)) / np.linalg.norm(values.astype(np.float64))
        assert error < 0.15
