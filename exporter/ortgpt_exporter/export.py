"""From a PyTorch `GPT` to an ONNX graph: named dynamic axes, one fused attention node a layer. Knows no files."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ortgpt.contract import KEY_VALUE, Axis, DType, Spec, native_tensors
from ortgpt_exporter.errors import ExportError
from ortgpt_models import GPT, GPTConfig
from ortgpt_models.gpt import Conv1D

# The first opset with Gelu, so that the activation is one node to recognise; `optimize` lowers it where it can.
EXPORT_OPSET = 20
ATTENTION = "GroupQueryAttention"
MICROSOFT = "com.microsoft"
_HEAD_DIM_MULTIPLE = 8
_DTYPES = {ir.DataType.FLOAT: DType.FLOAT32, ir.DataType.INT32: DType.INT32, ir.DataType.INT64: DType.INT64}


class _FusedAttention:
    """Emit one com.microsoft::GroupQueryAttention a layer, on key-value buffers that it updates in place."""

    def __init__(self, n_head: int, buffers: list[Tensor], seqlens_k: Tensor, total_sequence_length: Tensor) -> None:
        self.n_head = n_head
        self.buffers = buffers
        self.lengths = [seqlens_k, total_sequence_length]
        self.presents: list[Tensor] = []

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        past = self.buffers[2 * layer_index : 2 * layer_index + 2]
        batch, seq, width = qkv.shape
        out, *present = torch.onnx.ops.symbolic_multi_out(
            f"{MICROSOFT}::{ATTENTION}",
            [qkv, None, None, *past, *self.lengths],  # query holds key and value too
            attrs={"num_heads": self.n_head, "kv_num_heads": self.n_head, "scale": scale},
            dtypes=[qkv.dtype] * 3,
            shapes=[(batch, seq, width // 3), *(buffer.shape for buffer in past)],
            version=1,
        )
        self.presents += present
        return out


class _NativeGraph(nn.Module):
    """The network with the inputs and outputs of a native graph."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        logit_positions: Tensor,
        past_key_values: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        attend = _FusedAttention(self.gpt.config.n_head, past_key_values, seqlens_k, total_sequence_length)
        logits = self.gpt(input_ids, position_ids, attend=attend, logit_positions=logit_positions)
        return logits, attend.presents


def export_native(gpt: GPT) -> ir.Model:
    """Export `gpt`, which stays as it is, as a native graph (tensors and axes as in `ortgpt.contract`).

    Raises ExportError unless exactly one attention node a layer came out and every axis kept its name.
    """
    config = gpt.config
    head_dim = padded_head_dim(config.head_dim)
    module = _NativeGraph(gpt if head_dim == config.head_dim else pad_heads(gpt, head_dim)).eval()
    batch, seq, count, capacity = (
        torch.export.Dim(name) for name in (Axis.BATCH, Axis.SEQUENCE, Axis.LOGIT, Axis.CACHE)
    )
    inputs, outputs = native_tensors_of(config)
    cache = [torch.zeros(2, config.n_head, 8, head_dim) for _ in range(len(KEY_VALUE) * config.n_layer)]
    # Two rows of three tokens: sizes of 1 would be taken for constants.
    example = (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.full((2,), 2, dtype=torch.int32),
        torch.tensor(3, dtype=torch.int32),
        torch.zeros(2, 2, dtype=torch.int64),
        cache,
    )
    with _quiet():
        program = torch.onnx.export(
            module,
            example,
            dynamo=True,
            opset_version=EXPORT_OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=(
                {0: batch, 1: seq},
                {0: batch, 1: seq},
                {0: batch},
                None,
                {0: batch, 1: count},
                [{0: batch, 2: capacity}] * len(cache),
            ),
            verbose=False,
            optimize=False,  # it would fold the transposed head of a small model into a second copy
        )
    assert program is not None  # dynamo=True always returns a program
    model = program.model
    for value in list(model.graph.initializers.values()):
        assert value.name is not None
        value.name = value.name.removeprefix("gpt.")  # the checkpoint's own names
    check_native(model, config)
    return model


def check_native(model: ir.Model, config: GPTConfig) -> None:
    """Raise ExportError unless `model` has one attention node a layer and the tensors of the contract."""
    found = sum(node.op_type == ATTENTION and node.domain == MICROSOFT for node in model.graph)
    if found != config.n_layer:
        raise ExportError(f"the graph has {found} {ATTENTION} nodes for {config.n_layer} layers; expected one a layer")
    for wanted, values in zip(native_tensors_of(config), (model.graph.inputs, model.graph.outputs), strict=True):
        specs = {
            value.name: (
                "" if value.dtype is None else _DTYPES.get(value.dtype, value.dtype.name),
                tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()),
            )
            for value in values
        }
        if list(specs.items()) != list(wanted.items()):
            raise ExportError(f"the graph has the tensors {specs}; expected {wanted}")


def native_tensors_of(config: GPTConfig) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the contract's inputs and outputs for a network exported in float32."""
    return native_tensors(
        n_layer=config.n_layer,
        n_head=config.n_head,
        head_dim=padded_head_dim(config.head_dim),
        vocab_size=config.vocab_size,
        dtype=DType.FLOAT32,
    )


def padded_head_dim(head_dim: int) -> int:
    """Return the head size the attention operator takes: the next multiple of 8."""
    return -(-head_dim // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE


def pad_heads(gpt: GPT, head_dim: int) -> GPT:
    """Return a copy whose heads are `head_dim` wide, the added columns zero: the same function, at the same scale."""
    gpt = copy.deepcopy(gpt)
    n_embd, n_head, old = gpt.config.n_embd, gpt.config.n_head, gpt.config.head_dim
    for block in gpt.h:
        attn: Any = block.attn
        c_attn, c_proj = Conv1D(n_embd, 3 * n_head * head_dim), Conv1D(n_head * head_dim, n_embd)
        pad = (0, head_dim - old)
        with torch.no_grad():
            weight = attn.c_attn.weight.view(n_embd, 3, n_head, old)
            c_attn.weight.copy_(nn.functional.pad(weight, pad).reshape(n_embd, -1))
            c_attn.bias.copy_(nn.functional.pad(attn.c_attn.bias.view(3, n_head, old), pad).reshape(-1))
            rows = attn.c_proj.weight.view(n_head, old, n_embd)
            c_proj.weight.copy_(nn.functional.pad(rows, (0, 0, *pad)).reshape(-1, n_embd))
            c_proj.bias.copy_(attn.c_proj.bias)
        attn.c_attn, attn.c_proj = c_attn, c_proj
    return gpt


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from writing about torchvision and axis names that it merges, as it is meant to."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*axis name", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)
