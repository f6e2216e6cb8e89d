"""The graph: its nodes, axes, size and versions, and its values in ONNX Runtime for every kind of network."""

from __future__ import annotations

import collections
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ortgpt_exporter import ExportError
from ortgpt_exporter.graph.fusions import optimize_graph
from ortgpt_exporter.graph.to_onnx import check_operators, export_graph, halve, pad_heads, padded_head_dim
from ortgpt_models import GPT, GPTConfig
from ortgpt_models.presets import PRESETS

BASE = GPTConfig(vocab_size=97, n_positions=40, n_embd=48, n_layer=2, n_head=3)


def make_gpt(config: GPTConfig) -> GPT:
    torch.manual_seed(2)
    gpt = GPT(config).eval()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.normal_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0, 0.2)
    return gpt


def export(config: GPTConfig, flavour: str = "native", dtype: str = "float32") -> tuple[GPT, ir.Model]:
    gpt = make_gpt(config)
    model = export_graph(gpt, flavour, dtype)
    optimize_graph(model, config, flavour, dtype)
    return gpt, model


def run(
    model: ir.Model,
    path: Path,
    ids: np.ndarray[Any, Any],
    config: GPTConfig,
    dtype: str = "float32",
    output: str = "logits",
) -> np.ndarray[Any, Any]:
    """Run a prefill by hand, without the runtime package."""
    ir.save(model, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batch, seq = ids.shape
    feeds = {"input_ids": ids, "position_ids": np.tile(np.arange(seq), (batch, 1))}
    if "attention_mask" in {tensor.name for tensor in session.get_inputs()}:
        feeds["attention_mask"] = np.ones((batch, seq), np.int64)
        cache = np.zeros((batch, config.n_head, 0, config.head_dim), dtype)
    else:
        feeds["seqlens_k"] = np.full(batch, seq - 1, np.int32)
        feeds["total_sequence_length"] = np.array(seq, np.int32)
        feeds["logit_positions"] = feeds["position_ids"]
        feeds["logit_rows"] = np.arange(seq)
        cache = np.zeros((batch, config.n_head, seq, padded_head_dim(config.head_dim)), dtype)
    feeds |= {tensor.name: cache for tensor in session.get_inputs() if tensor.name.startswith("past")}
    found: np.ndarray[Any, Any] = session.run([output], feeds)[0]
    return found


CONFIGS = [
    BASE,
    replace(BASE, n_layer=1, n_head=1, activation_function="relu", n_inner=20),
    replace(BASE, n_head=4, activation_function="gelu", scale_attn_by_inverse_layer_idx=True),
    replace(BASE, n_embd=35, n_head=5, activation_function="silu", scale_attn_weights=False),
    replace(BASE, n_layer=5, n_embd=24, n_head=2, layer_norm_epsilon=1e-2),
    replace(BASE, n_layer=1, activation_function="quick_gelu", tie_word_embeddings=False),
    replace(BASE, n_layer=1, activation_function="tanh"),
    replace(BASE, n_layer=1, activation_function="gelu_fast"),
    replace(BASE, n_layer=1, activation_function="sqrtsoftplus"),
    replace(BASE, norm="post"),
    replace(BASE, norm="post", n_embd=35, n_head=5, activation_function="silu", tie_word_embeddings=False),
    replace(BASE, norm="post", n_layer=1, activation_function="relu"),
]
ODD = (CONFIGS[2], CONFIGS[3], CONFIGS[5])
FORMATS = [
    ("native", "float32", 1e-4),
    ("native", "float16", 2e-2),
    ("portable", "float32", 1e-4),
    ("portable", "float16", 2e-2),
]


# Every network in the default format, three odd ones in every format.
@pytest.mark.parametrize(
    ("config", "flavour", "dtype", "tolerance"),
    [(config, *export_format) for config in CONFIGS for export_format in (FORMATS if config in ODD else FORMATS[:1])],
)
def test_every_kind_of_network_computes_what_pytorch_does(
    config: GPTConfig, flavour: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    gpt, model = export(config, flavour, dtype)
    ids = np.random.default_rng(0).integers(97, size=(2, 11))
    found = run(model, tmp_path / "model.onnx", ids, config, dtype)
    with torch.no_grad():
        want = gpt(torch.from_numpy(ids)).numpy()
    assert found.dtype == np.float32
    assert np.abs(found - want).max() <= tolerance * max(1, np.abs(want).max())
    if flavour == "native":
        hidden = run(model, tmp_path / "model.onnx", ids, config, dtype, "hidden_states")
        with torch.no_grad():
            want = gpt.hidden(torch.from_numpy(ids)).numpy()
        assert hidden.dtype == np.float32
        assert np.abs(hidden - want).max() <= tolerance * max(1, np.abs(want).max())


def test_nodes_axes_and_versions(tmp_path: Path) -> None:
    _, model = export(BASE)
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    proto = onnx.load(tmp_path / "model.onnx")
    # LayerNormalization came with opset 17, which came with IR version 8.
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 17, "com.microsoft": 1}
    assert proto.ir_version == 8
    assert collections.Counter(node.op_type for node in proto.graph.node) == {
        "GroupQueryAttention": 2, "LayerNormalization": 5, "FastGelu": 2, "MatMul": 8, "FusedMatMul": 1, "Add": 11,
        "Gather": 3, "GatherElements": 2, "Unsqueeze": 1, "Expand": 1,
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
        "logit_positions": ["batch_size", "hidden_count"],
        "logit_rows": ["logit_count"],
        "logits": ["batch_size", "logit_count", 97],
        "hidden_states": ["batch_size", "hidden_count", 48],
        **{
            f"{when}.{layer}.{kind}": cache
            for when in ("past_key_values", "present")
            for layer in (0, 1)
            for kind in ("key", "value")
        },
    }
    for node in proto.graph.node:
        assert not node.doc_string
        assert not node.metadata_props  # torch's notes on source files of this machine


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_portable_graph_has_standard_operators_and_the_axes_that_others_expect(dtype: str, tmp_path: Path) -> None:
    _, model = export(BASE, "portable", dtype)
    ir.save(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    proto = onnx.load(tmp_path / "model.onnx")
    assert {node.domain for node in proto.graph.node} == {""}
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 18}
    assert proto.ir_version == 8
    specs = {
        tensor.name: (
            onnx.helper.tensor_dtype_to_np_dtype(tensor.type.tensor_type.elem_type).name,
            [dim.dim_param or dim.dim_value for dim in tensor.type.tensor_type.shape.dim],
        )
        for tensor in (*proto.graph.input, *proto.graph.output)
    }
    assert specs == {
        "input_ids": ("int64", ["batch_size", "sequence_length"]),
        "attention_mask": ("int64", ["batch_size", "total_sequence_length"]),
        "position_ids": ("int64", ["batch_size", "sequence_length"]),
        "logits": ("float32", ["batch_size", "sequence_length", 97]),
        **{
            f"{when}.{layer}.{kind}": (dtype, ["batch_size", 3, axis, 16])
            for when, axis in (("past_key_values", "past_sequence_length"), ("present", "total_sequence_length"))
            for layer in (0, 1)
            for kind in ("key", "value")
        },
    }


def test_a_graph_for_a_gpu_has_no_node_that_would_stay_on_the_cpu() -> None:
    """ONNX Runtime computes shapes on the CPU; a session that forbids that refuses a graph with such nodes."""
    _, model = export(BASE, "native", "float16")
    kinds = {node.op_type for node in model.graph}
    assert not kinds & {"Shape", "Size", "Range", "ConstantOfShape", "NonZero", "If", "Loop"}
    integers = {ir.DataType.INT64, ir.DataType.INT32}
    for node in model.graph:
        assert all(value.dtype not in integers for value in node.outputs) or node.op_type in ("Unsqueeze", "Expand")


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


@pytest.mark.parametrize(("norm", "expected"), [("pre", 5), ("post", 4)])
def test_in_float16_residual_additions_join_the_normalization_after_them(norm: str, expected: int) -> None:
    _, model = export(replace(BASE, norm=norm), "native", "float16")
    counts = collections.Counter(node.op_type for node in model.graph)
    assert (counts["SkipLayerNormalization"], counts["LayerNormalization"]) == (expected, 0)


def test_weights_that_happen_to_be_equal_stay_apart() -> None:
    """All gains are 1 and all biases 0 in a new network; quantisation must find each by its name."""
    gpt = GPT(BASE).eval()
    model = export_graph(gpt, "native", "float32")
    optimize_graph(model, BASE, "native", "float32")
    assert gpt.state_dict().keys() <= model.graph.initializers.keys()


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


def test_float16_logits_far_from_zero_keep_their_differences(tmp_path: Path) -> None:
    """Logits near -100 are multiples of 1/16 in float16; their common part must not hide the differences."""
    gpt = make_gpt(BASE)
    with torch.no_grad():
        direction = torch.ones(48) / 48**0.5
        gpt.get_parameter("wte.weight").sub_(4.0 * direction)
        gpt.get_parameter("ln_f.bias").add_(25.0 * direction)
    model = export_graph(gpt, "native", "float16")
    optimize_graph(model, BASE, "native", "float16")
    ids = np.random.default_rng(0).integers(97, size=(1, 30))
    with torch.no_grad():
        want = gpt(torch.from_numpy(ids)).numpy()
    assert want.mean() < -90
    found = run(model, tmp_path / "model.onnx", ids, BASE, "float16")
    # A constant added to a whole row changes no probability.
    apart = (found - found.mean(-1, keepdims=True)) - (want - want.mean(-1, keepdims=True))
    assert np.abs(apart).max() < 0.5 / 16
    assert len(np.unique(found[0, -1])) > 90  # of 97: few fall together


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_on_the_left_gives_no_nan_in_float16(norm: str) -> None:
    """All scores of a query that is padding are hidden; those of this network lie near -100 before that.

    ONNX Runtime adds in float32 on a CPU. The reference evaluator of onnx computes in float16, as GPUs do.
    """
    config = replace(BASE, norm=norm)
    gpt = make_gpt(config)
    width = config.n_embd
    with torch.no_grad():
        for layer in range(config.n_layer):
            weight, bias = (gpt.get_parameter(f"h.{layer}.attn.c_attn.{part}") for part in ("weight", "bias"))
            bias[:width], bias[width : 2 * width] = 5.0, -5.0
            weight[:, : 2 * width] *= 0.1
    model = export_graph(gpt, "portable", "float16")
    optimize_graph(model, config, "portable", "float16")
    evaluator: Any = onnx.reference.ReferenceEvaluator(ir.to_proto(model))
    ids = np.random.default_rng(0).integers(97, size=(1, 8))
    feeds: dict[str, Any] = {
        "input_ids": np.concatenate((np.zeros((1, 3), np.int64), ids), axis=1),
        "attention_mask": np.array([[0] * 3 + [1] * 8]),
        "position_ids": np.array([[0, 0, 0, *range(8)]]),
    }
    cache = np.zeros((1, config.n_head, 0, config.head_dim), np.float16)
    feeds |= {name: cache for name in evaluator.input_names if name.startswith("past")}
    found: Any = evaluator.run(["logits"], feeds)[0]
    with torch.no_grad():
        want = gpt(torch.from_numpy(ids)).numpy()
    assert np.isfinite(found).all()
    assert np.abs(found[:, 3:] - want).max() <= 2e-2 * max(1.0, float(np.abs(want).max()))


def test_weights_that_float16_cannot_hold_are_named() -> None:
    gpt = make_gpt(BASE)
    assert halve(gpt).state_dict()["h.1.ln_2.weight"].dtype == torch.float16
    with torch.no_grad():
        gpt.get_parameter("h.1.mlp.c_fc.weight")[3, 4] = 70_000
    with pytest.raises(ExportError, match=r"h\.1\.mlp\.c_fc\.weight has values beyond 65504.*export in float32"):
        halve(gpt)


def test_a_graph_that_did_not_fuse_fails() -> None:
    model = export_graph(make_gpt(BASE), "native", "float32")
    check_operators(model, "native", 2)
    with pytest.raises(ExportError, match="2 GroupQueryAttention nodes for 3 layers"):
        check_operators(model, "native", 3)
    with pytest.raises(ExportError, match=r"com\.microsoft::FusedMatMul.*a portable one has only standard operators"):
        check_operators(model, "portable", 2)
    next(node for node in model.graph if node.op_type == "GroupQueryAttention").op_type = "Attention"
    with pytest.raises(ExportError, match="1 GroupQueryAttention nodes for 2 layers; expected one per layer"):
        check_operators(model, "native", 2)


def test_a_fusion_that_missed_a_place_fails() -> None:
    model = export_graph(make_gpt(BASE), "native", "float32")
    with pytest.raises(ExportError, match=r"'activation': 2.*this network has.*'activation': 3"):
        optimize_graph(model, replace(BASE, n_layer=3), "native", "float32")


def test_exporting_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for flavour, dtype, _ in FORMATS:
            export_graph(make_gpt(BASE), flavour, dtype)
    assert [str(warning.message) for warning in caught] == []
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
