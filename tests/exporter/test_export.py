"""The graph itself: its nodes, axes, size and versions, and its values by ONNX Runtime for every kind of network."""

from __future__ import annotations

import collections
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ortgpt_exporter import ExportError
from ortgpt_exporter.export import check_native, export_native, pad_heads, padded_head_dim
from ortgpt_exporter.optimize import optimize_native
from ortgpt_models import GPT, PRESETS, GPTConfig

BASE = GPTConfig(vocab_size=97, n_positions=40, n_embd=48, n_layer=2, n_head=3)


def make_gpt(config: GPTConfig) -> GPT:
    torch.manual_seed(2)
    gpt = GPT(config).eval()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.normal_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0, 0.2)
    return gpt


def export(config: GPTConfig) -> tuple[GPT, ir.Model]:
    gpt = make_gpt(config)
    model = export_native(gpt)
    optimize_native(model, n_layer=config.n_layer, tanh_gelu=config.activation_function == "gelu_new")
    return gpt, model


def run(model: ir.Model, path: Path, ids: np.ndarray[Any, Any], heads: int, width: int) -> np.ndarray[Any, Any]:
    """Run a prefill by hand, without the runtime package."""
    ir.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batch, seq = ids.shape
    feeds = {
        "input_ids": ids,
        "position_ids": np.tile(np.arange(seq), (batch, 1)),
        "seqlens_k": np.full(batch, seq - 1, np.int32),
        "total_sequence_length": np.array(seq, np.int32),
        "logit_positions": np.tile(np.arange(seq), (batch, 1)),
    }
    cache = np.zeros((batch, heads, seq, width), np.float32)
    feeds |= {tensor.name: cache for tensor in session.get_inputs() if tensor.name.startswith("past")}
    logits: np.ndarray[Any, Any] = session.run(["logits"], feeds)[0]
    return logits


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        replace(BASE, n_layer=1, n_head=1, activation_function="relu", n_inner=20),
        replace(BASE, n_head=4, activation_function="gelu", scale_attn_by_inverse_layer_idx=True),
        replace(BASE, n_embd=35, n_head=5, activation_function="silu", scale_attn_weights=False),
        replace(BASE, n_layer=5, n_embd=24, n_head=2, layer_norm_epsilon=1e-2),
    ],
)
def test_every_kind_of_network_computes_what_pytorch_does(config: GPTConfig, tmp_path: Path) -> None:
    gpt, model = export(config)
    ids = np.random.default_rng(0).integers(97, size=(2, 11))
    found = run(model, tmp_path / "model.onnx", ids, config.n_head, padded_head_dim(config.head_dim))
    with torch.no_grad():
        want = gpt(torch.from_numpy(ids)).numpy()
    assert np.abs(found - want).max() <= 1e-4 * max(1, np.abs(want).max())


def test_nodes_axes_and_versions(tmp_path: Path) -> None:
    _, model = export(BASE)
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    proto = onnx.load(tmp_path / "model.onnx")
    # LayerNormalization came with opset 17, which came with IR version 8.
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 17, "com.microsoft": 1}
    assert proto.ir_version == 8
    assert collections.Counter(node.op_type for node in proto.graph.node) == {
        "GroupQueryAttention": 2, "SkipLayerNormalization": 4, "LayerNormalization": 1, "FastGelu": 2, "MatMul": 8,
        "FusedMatMul": 1, "Add": 4, "Gather": 2, "GatherElements": 1, "Unsqueeze": 1, "Expand": 1,
    }  # fmt: skip
    shapes = {
        tensor.name: [dim.dim_param or dim.dim_value for dim in tensor.type.tensor_type.shape.dim]
        for tensor in (*proto.graph.input, *proto.graph.output)
    }
    cache = ["batch_size", 3, "cache_length", 16]
    assert shapes == {
        "input_ids": ["batch_size", "sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
        "seqlens_k": ["batch_size"],
        "total_sequence_length": [],
        "logit_positions": ["batch_size", "logit_count"],
        "logits": ["batch_size", "logit_count", 97],
        **{
            f"{when}.{layer}.{kind}": cache
            for when in ("past_key_values", "present")
            for layer in (0, 1)
            for kind in ("key", "value")
        },
    }
    for node in proto.graph.node:
        assert not node.doc_string
        assert not node.metadata_props  # where in whose source tree it came from is nobody's business


def test_initializers_are_the_checkpoints_tensors_once(tmp_path: Path) -> None:
    gpt, model = export(BASE)
    state = gpt.state_dict()
    found = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert state.keys() <= found.keys()
    for name, tensor in state.items():
        stored = found[name]
        assert stored is not None
        assert np.array_equal(stored.numpy(), tensor.numpy())
    assert (
        sum(value.size for value in found.values() if value is not None) - sum(t.numel() for t in state.values()) < 10
    )


def test_an_operator_of_a_later_opset_raises_the_version() -> None:
    _, model = export(replace(BASE, activation_function="gelu"))  # Gelu came with opset 20
    assert (model.opset_imports[""], model.ir_version) == (20, 9)


def test_the_file_is_no_larger_than_its_weights(tmp_path: Path) -> None:
    gpt, model = export(replace(PRESETS["minigpt"], vocab_size=5000))
    ir.save(model, tmp_path / "model.onnx")
    weights = 4 * sum(parameter.numel() for parameter in gpt.parameters())
    assert weights <= (tmp_path / "model.onnx").stat().st_size <= 1.02 * weights
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(("head_dim", "padded"), [(1, 8), (7, 8), (8, 8), (9, 16), (12, 16), (64, 64), (100, 104)])
def test_padded_head_dim(head_dim: int, padded: int) -> None:
    assert padded_head_dim(head_dim) == padded


@torch.no_grad()
def test_padding_heads_changes_no_value_and_not_the_original() -> None:
    config = replace(BASE, n_embd=36, n_head=3)
    gpt = make_gpt(config)
    before = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    padded = pad_heads(gpt, 16)
    ids = torch.randint(97, (2, 20))
    assert padded.state_dict()["h.1.attn.c_attn.weight"].shape == (36, 144)
    assert padded.state_dict()["h.1.attn.c_proj.weight"].shape == (48, 36)
    assert (padded(ids) - gpt(ids)).abs().max() <= 1e-5
    assert all(torch.equal(before[name], tensor) for name, tensor in gpt.state_dict().items())


def test_a_graph_that_did_not_fuse_fails() -> None:
    model = export_native(make_gpt(BASE))
    check_native(model, BASE)
    with pytest.raises(ExportError, match="2 GroupQueryAttention nodes for 3 layers"):
        check_native(model, replace(BASE, n_layer=3))
    with pytest.raises(ExportError, match=r"has the tensors.*97.*expected.*98"):
        check_native(model, replace(BASE, vocab_size=98))
    next(node for node in model.graph if node.op_type == "GroupQueryAttention").op_type = "Attention"
    with pytest.raises(ExportError, match="1 GroupQueryAttention nodes for 2 layers; expected one a layer"):
        check_native(model, BASE)


def test_a_fusion_that_missed_a_place_fails() -> None:
    model = export_native(make_gpt(BASE))
    with pytest.raises(ExportError, match=r"'activation': 2.*this network has.*'activation': 3"):
        optimize_native(model, n_layer=3, tanh_gelu=True)


def test_exporting_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_native(make_gpt(BASE))
    assert [str(warning.message) for warning in caught] == []
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
