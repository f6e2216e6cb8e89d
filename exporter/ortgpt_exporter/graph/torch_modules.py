"""Wrap the network in modules with the inputs and outputs of each flavour, which torch can export. Knows no files.

The network takes its attention as an argument: here either one that emits the fused operator, or one of standard
operators on a growing cache.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ortgpt.contract import KEY_VALUE, Axis, Flavour
from ortgpt_models import GPT
from ortgpt_models.gpt import merge_heads

ATTENTION = "GroupQueryAttention"
MICROSOFT = "com.microsoft"


class FlavouredGraph(nn.Module):
    """The module that torch exports, with inputs and outputs in the order of the contract.

    `gpt` computes and caches in the type of its weights, float32 or float16; the logits are float32.
    """

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations and cache."""
        return self.gpt.wte.weight.dtype

    @property
    @abstractmethod
    def example(self) -> tuple[Any, ...]:
        """Arguments of forward() for torch to trace: two rows of three tokens, since torch takes 1 for a constant."""

    @property
    @abstractmethod
    def dynamic_shapes(self) -> tuple[Any, ...]:
        """The dynamic axes of each argument of forward()."""

    def cache_example(self, length: int) -> list[Tensor]:
        """Return empty caches of two rows, keys and values of each layer."""
        config = self.gpt.config
        attn: Any = self.gpt.h[0].attn
        head_dim: int = attn.c_proj.weight.shape[0] // config.n_head  # config's may be smaller: heads can be padded
        shape = (2, config.n_head, length, head_dim)
        return [torch.zeros(shape, dtype=self.dtype) for _ in range(len(KEY_VALUE) * config.n_layer)]

    def head(self, x: Tensor) -> Tensor:
        """Map (batch, count, n_embd) to float32 logits (batch, count, vocab_size) by the untransposed weight."""
        head: nn.Module = self.gpt.head
        if not isinstance(head, WideHead):
            return self.matmul_transposed(x, self.gpt.head.weight)
        common = head.common(x)  # (batch, count, tail)
        rounded = self.matmul_transposed(torch.cat((x, -common), dim=2), head.weight)
        return rounded.float() + common[..., :1].float()

    @abstractmethod
    def matmul_transposed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply `x` (batch, count, width) by `weight` (rows, width), giving (batch, count, rows)."""


class NativeGraph(FlavouredGraph):
    """The native flavour: fused attention on fixed buffers, and logits and hidden states of chosen positions."""

    @property
    def example(self) -> tuple[Any, ...]:
        return (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.full((2,), 2, dtype=torch.int32),
            torch.tensor(3, dtype=torch.int32),
            torch.zeros(2, 4, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
            self.cache_example(8),
        )

    @property
    def dynamic_shapes(self) -> tuple[Any, ...]:
        batch, seq, hidden_count, logit_count, capacity = dims(
            Axis.BATCH, Axis.SEQUENCE, Axis.HIDDEN, Axis.LOGIT, Axis.CACHE
        )
        cache = [{0: batch, 2: capacity}] * len(KEY_VALUE) * self.gpt.config.n_layer
        ids, positions = {0: batch, 1: seq}, {0: batch, 1: hidden_count}
        return (ids, ids, {0: batch}, None, positions, {0: logit_count}, cache)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        logit_positions: Tensor,
        logit_rows: Tensor,
        past_key_values: list[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        attend = _FusedAttention(self.gpt.config.n_head, past_key_values, seqlens_k, total_sequence_length)
        x = self.gpt.hidden(input_ids, position_ids, attend=attend, logit_positions=logit_positions)
        shape = (x.shape[0], logit_rows.shape[0], x.shape[2])
        # torch's index_select would come with a Reshape of the rows.
        chosen = torch.onnx.ops.symbolic(
            "Gather", [x, logit_rows], attrs={"axis": 1}, dtype=x.dtype, shape=shape, version=13
        )
        return self.head(chosen), x.float(), attend.presents

    def matmul_transposed(self, x: Tensor, weight: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], weight.shape[0])
        return torch.onnx.ops.symbolic(
            f"{MICROSOFT}::FusedMatMul", [x, weight], attrs={"transB": 1}, dtype=x.dtype, shape=shape, version=1
        )


class PortableGraph(FlavouredGraph):
    """The portable flavour: standard operators, a cache that grows by concatenation, and logits of every position.

    Tensors and axes are those of Hugging Face Optimum, onnxruntime-genai (type "decoder") and Transformers.js.
    """

    @property
    def example(self) -> tuple[Any, ...]:
        return (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.ones(2, 7, dtype=torch.int64),
            torch.zeros(2, 3, dtype=torch.int64),
            self.cache_example(4),
        )

    @property
    def dynamic_shapes(self) -> tuple[Any, ...]:
        batch, seq, past = dims(Axis.BATCH, Axis.SEQUENCE, Axis.PAST)
        cache = [{0: batch, 2: past}] * len(KEY_VALUE) * self.gpt.config.n_layer
        # torch itself infers that the mask is as long as past and new tokens together.
        return ({0: batch, 1: seq}, {0: batch, 1: torch.export.Dim.AUTO}, {0: batch, 1: seq}, cache)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        total, seq = attention_mask.shape[1], input_ids.shape[1]
        slots = torch.arange(total)
        causal = slots[None, :] <= slots[total - seq :, None]  # (seq, total)
        visible = causal & (attention_mask[:, None, :] != 0)  # (batch, seq, total)
        # Not -inf: every position is hidden from a query that is padding, and -inf gives NaN there. Half of the lowest
        # number, so that the sum with a negative score is not -inf in float16, either.
        hidden = torch.full((), torch.finfo(self.dtype).min / 2, dtype=self.dtype)
        bias = torch.where(visible, torch.zeros((), dtype=self.dtype), hidden)[:, None]
        attend = _GrowingAttention(self.gpt.config.n_head, past_key_values, bias)
        return self.head(self.gpt.hidden(input_ids, position_ids, attend=attend)), attend.presents

    def matmul_transposed(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[2])
        shape = (rows.shape[0], weight.shape[0])
        out = torch.onnx.ops.symbolic(
            "Gemm", [rows, weight], attrs={"transB": 1}, dtype=x.dtype, shape=shape, version=13
        )
        return out.view(x.shape[0], x.shape[1], -1)


GRAPHS: dict[str, type[FlavouredGraph]] = {Flavour.NATIVE: NativeGraph, Flavour.PORTABLE: PortableGraph}


class WideHead(nn.Module):
    """A float16 head with 8 columns more, which keep the logits small until they are float32; the embedding if tied.

    GPT-2's logits are near -100, where float16 has only multiples of 1/16. The part that all tokens share is the hidden
    state times the mean row of the head. Its negative extends the hidden state by 8 columns, where the head has 1/8, so
    the product is smaller by that part before it is rounded. The part is added again in float32.
    """

    TAIL = 8  # keeps the width a multiple of 8, which GPUs multiply fastest

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.n_embd = weight.shape[1]
        tail = torch.full((weight.shape[0], self.TAIL), 1 / self.TAIL, dtype=weight.dtype)
        self.weight = nn.Parameter(torch.cat((weight, tail), dim=1), requires_grad=False)
        mean = weight.float().mean(0).to(weight.dtype)
        self.mean = nn.Parameter(mean[:, None].repeat(1, self.TAIL), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up (batch, count, n_embd), without the additional columns."""
        return nn.functional.embedding(input_ids, self.weight)[..., : self.n_embd]

    def common(self, x: Tensor) -> Tensor:
        """Return the part that all logits of `x` (batch, count, n_embd) share, 8 times: (batch, count, 8)."""
        return x @ self.mean


class _FusedAttention:
    """Emit one com.microsoft::GroupQueryAttention per layer, on key-value buffers that it updates in place."""

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


class _GrowingAttention:
    """Attend to past and new tokens by matrix products; `bias` (batch, 1, seq, total) hides positions from queries."""

    def __init__(self, n_head: int, pasts: list[Tensor], bias: Tensor) -> None:
        self.n_head = n_head
        self.pasts = pasts
        self.bias = bias
        self.presents: list[Tensor] = []

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        batch, seq, width = qkv.shape
        query, key, value = (
            part.view(batch, seq, self.n_head, -1).transpose(1, 2) for part in torch.split(qkv, width // 3, dim=2)
        )
        past_key, past_value = self.pasts[2 * layer_index : 2 * layer_index + 2]
        key, value = torch.cat((past_key, key), dim=2), torch.cat((past_value, value), dim=2)
        self.presents += [key, value]
        # Scaled before the product, which could overflow in float16.
        scores = (query * scale) @ key.transpose(2, 3) + self.bias  # (batch, n_head, seq, total)
        return merge_heads(torch.softmax(scores, dim=-1) @ value)


def dims(*names: str) -> tuple[Any, ...]:
    """Return a dynamic axis for each name."""
    return tuple(torch.export.Dim(name) for name in names)
