"""GPTQ: against its closed form, plain rounding, and PyTorch's activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortgpt_exporter import export_bundle
from ortgpt_exporter.quantization.blocks import quantize_blocks
from ortgpt_exporter.quantization.gptq import quantize_gptq
from ortgpt_exporter.quantization.hessians import Calibration
from ortgpt_exporter.quantization.rewrite_graph import product_inputs
from ortgpt_exporter.texts import TextRows, spread_rows
from ortgpt_models import load_gpt
from support import write_checkpoint

RNG = np.random.default_rng(0)


def correlated(width: int, tokens: int = 400) -> Any:
    """Return XᵀX of activations whose channels resemble each other."""
    x = RNG.normal(size=(tokens, width)) + RNG.normal(size=(tokens, 1)) * RNG.uniform(0.5, 3, size=width)
    return x.T @ x


def loss(matrix: Any, rounded: Any, hessian: Any) -> float:
    """Return the summed squared error of the products."""
    error = (matrix - rounded).astype(np.float64)
    return float(np.einsum("ij,jk,ik->", error, hessian, error))


@pytest.mark.parametrize("bits", [4, 8])
def test_products_change_less_than_by_plain_rounding(bits: int) -> None:
    matrix, hessian = RNG.normal(size=(40, 96)).astype(np.float32), correlated(96)
    plain = quantize_blocks(matrix, bits=bits, block_size=32).dequantized()
    careful = quantize_gptq(matrix, hessian, bits=bits, block_size=32)
    assert loss(matrix, careful.dequantized(), hessian) < 0.5 * loss(matrix, plain, hessian)
    assert careful.integers.shape == (40, 3, 32)
    assert careful.integers.max() <= 2**bits - 1


def test_uncorrelated_channels_are_rounded_independently() -> None:
    matrix = RNG.normal(size=(5, 32)).astype(np.float32)
    hessian = np.diag(RNG.uniform(1, 9, size=32))
    hessian[4, 4] = 0.0  # a channel that is always zero
    found = quantize_gptq(matrix, hessian, bits=4, block_size=16)
    plain = quantize_blocks(matrix, bits=4, block_size=16)
    assert np.array_equal(found.scales, plain.scales)
    nearest = np.clip(np.round(matrix.reshape(5, 2, 16) / plain.scales[..., None]), -8, 7) + 8
    assert np.array_equal(found.integers, nearest)


def test_the_second_of_two_columns_compensates_the_first() -> None:
    """The best second weight, given the first one's error e, is w + e × H01 / H11."""
    matrix = RNG.normal(size=(50, 2)).astype(np.float32)
    hessian = np.array([[5.0, 3.0], [3.0, 4.0]])
    found = quantize_gptq(matrix, hessian, bits=4, block_size=2)
    scale = found.scales[:, 0].astype(np.float64)
    values = found.dequantized()
    damped = hessian + 0.01 * 4.5 * np.eye(2)
    target = matrix[:, 1] + (matrix[:, 0] - values[:, 0]) * damped[0, 1] / damped[1, 1]
    assert np.array_equal(found.integers[:, 0, 0], np.clip(np.round(matrix[:, 0] / scale), -8, 7) + 8)
    assert np.abs(np.clip(target / scale, -8, 7) - (found.integers[:, 0, 1] - 8.0)).max() <= 0.5 + 1e-5


@pytest.mark.parametrize("flavour", ["native", "portable"])
@torch.no_grad()
def test_the_sums_are_those_of_what_pytorch_multiplies(flavour: str, tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", n_head=6)
    source = export_bundle(checkpoint, tmp_path / "bundle", flavour=flavour).path
    gpt = load_gpt(checkpoint)
    rows = [[5, 9, 200, 7, 7], [1, 2, 3]]
    expected: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0].double().reshape(-1, inputs[0].shape[-1])
            expected[name] = expected.get(name, 0) + x.T @ x

        return hook

    for layer, block in enumerate(gpt.h):
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            block.get_submodule(part).register_forward_pre_hook(watch(f"h.{layer}.{part}.weight"))
    for row in rows:
        gpt(torch.tensor([row]))
        hidden = gpt.hidden(torch.tensor([row]))[0].double()  # runs the layers once more
        expected["wte.weight"] = expected.get("wte.weight", 0) + hidden.T @ hidden
    model = ir.load(source / "model.onnx")
    count = len(model.graph.outputs)
    monkeypatch.setattr("ortgpt_exporter.quantization.hessians._MAX_BYTES", 3 * 8 * 48**2)  # several runs
    names = list(product_inputs(model))
    assert sorted(names) == sorted(expected)
    calibration = Calibration(model, product_inputs(model), rows, flavour, tmp_path, wanted=names)
    assert len(model.graph.outputs) == count
    for name in ("wte.weight", *names[:-1]):
        found = calibration.hessian(name)
        hessian = expected[name] / (1 if name == "wte.weight" else 2)
        assert np.abs(found - hessian.numpy()).max() <= 1e-5 * float(hessian.abs().max())
    (tmp_path / "few").mkdir()
    few = Calibration(model, product_inputs(model), rows, flavour, tmp_path / "few", wanted=names[1:2])
    assert np.abs(few.hessian(names[1]) - expected[names[1]].numpy() / 2).max() <= 1e-5 * float(
        expected[names[1]].max()
    )


def test_rows_of_a_long_text_are_spread_over_all_of_it() -> None:
    for count in (100, 16_385, 33_000, 1_000_000):
        rows = spread_rows(TextRows("t", [list(range(count))], count), 256, max_tokens=16_384).rows
        assert sum(map(len, rows)) >= min(count, 16_384) - 256
        assert len(rows) <= 64
        assert rows[0][0] == 0
        assert rows[-1][-1] == count - 1
