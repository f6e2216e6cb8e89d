"""Rounding in blocks: what the integers stand for, against ONNX Runtime's kernel and the matrix itself."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortgpt_exporter.quantization.blocks import METHODS, Blocks, quantize_blocks


def matrix(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(48, 96)).astype(np.float32)
    values[3, 5] = 9.0  # an outlier
    values[7] = 0.0
    values[8, :32] = -1.5  # a block of one value
    return values


def onnx_runtime_product(blocks: Blocks, x: Any) -> Any:
    """Multiply by MatMulNBits, with the activations as they are."""
    rows, count, _ = blocks.packed().shape
    weights: dict[str, Any] = {"b": blocks.packed(), "scales": blocks.scales.reshape(-1)}
    zero_points = blocks.packed_zero_points()
    if zero_points is not None:
        weights["zero_points"] = zero_points.reshape(-1)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32])
def test_onnx_runtime_multiplies_by_what_the_integers_stand_for(method: str, bits: int, block_size: int) -> None:
    blocks = quantize_blocks(matrix(), bits=bits, block_size=block_size, method=method)
    x = np.random.default_rng(1).normal(size=(5, 96)).astype(np.float32)
    assert np.abs(onnx_runtime_product(blocks, x) - x @ blocks.dequantized().T).max() < 2e-4
    # Half a step of the largest block range is the most that rounding to nearest may change; a search may trade some.
    error = np.abs(blocks.dequantized() - matrix())
    step = (matrix().max() - matrix().min()) / (2**bits - 1)
    assert error.max() <= (0.51 if method in ("rtn", "hqq") else 2.5) * step
    assert not blocks.dequantized()[7].any()


def test_the_search_beats_the_scale_that_just_fits() -> None:
    rows = np.random.default_rng(2).normal(size=(200, 32)).astype(np.float32)
    largest = rows[np.arange(200), np.abs(rows).argmax(1)][:, None]
    plain = np.clip(np.round(rows / (largest / -8)), -8, 7) * (largest / -8)
    found = quantize_blocks(rows, bits=4, block_size=32, method="scale-search").dequantized()
    assert np.square(found - rows).sum() < 0.9 * np.square(plain - rows).sum()


def test_known_integers() -> None:
    row = np.array([[-8.0, 7.0, 3.0, 0.0] * 4], np.float32)
    blocks = quantize_blocks(row, bits=4, block_size=16, method="scale-search")
    assert blocks.integers[0, 0, :4].tolist() == [0, 15, 11, 8]
    assert blocks.scales[0, 0] == pytest.approx(1.0)
    assert blocks.packed()[0, 0, :2].tolist() == [15 << 4 | 0, 8 << 4 | 11]
    assert np.allclose(blocks.dequantized(), row, atol=1e-6)


def test_odd_zero_points_fill_up_a_byte() -> None:
    blocks = Blocks(
        bits=4,
        integers=np.zeros((2, 3, 16), np.uint8),
        scales=np.ones((2, 3), np.float32),
        zero_points=np.array([[1, 2, 3], [4, 5, 6]], np.uint8),
    )
    packed = blocks.packed_zero_points()
    assert packed is not None
    assert packed.tolist() == [[0x21, 0x03], [0x54, 0x06]]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_far_from_zero_are_not_lost(method: str) -> None:
    far = np.tile(np.linspace(3, 4, 16, dtype=np.float32), (4, 1)) * np.array([[1], [-1], [100], [-1e-3]], np.float32)
    found = quantize_blocks(far, bits=8, block_size=16, method=method).dequantized()
    assert np.abs(found / far - 1).max() < 0.02


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e25])
def test_weights_of_any_size_are_rounded_alike_and_without_a_word(method: str, size: float) -> None:
    values = (matrix() * np.float32(size)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = quantize_blocks(values, bits=4, block_size=32, method=method).dequantized()
    assert np.isfinite(found).all()
    if size > 1e-40:  # below, numbers have few digits themselves
        error = np.linalg.norm((found - values).astype(np.float64)) / np.linalg.norm(values.astype(np.float64))
        assert error < 0.15


def test_hqq_leaves_the_programs_logging_alone() -> None:
    code = (
        "import logging, numpy as np\n"
        "from ortgpt_exporter.blocks import quantize_blocks\n"
        "quantize_blocks(np.ones((2, 32), np.float32), bits=4, block_size=32, method='hqq')\n"
        "print(logging.getLogger().level, logging.getLogger().handlers)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "30 []\n"
