"""The network with the inputs and outputs of each flavour, as modules that torch can export. Knows no files.

Attention is a strategy handed to the network: one that emits the fused operator, or one of standard operators on a
growing cache.
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
    """What torch exports: `example` and `dynamic_shapes` are those of forward(), in the order of the contract.

    `gpt` computes and caches in the type of its weights, float32 or float16; the logits are float32.
    """

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    @property
    def dtype(self) -> torch.dtype:
        return self.gpt.wte.weight.dtype

    @property
    @abstractmethod
    def example(self) -> tuple[Any, ...]:
        """Two rows of three tokens: sizes of 1 would be taken for constants."""

    @property
    @abstractmethod
    def dynamic_shapes(self) -> tuple[Any, ...]: ...

    def cache_example(self, length: int) -> list[Tensor]:
        config = self.gpt.config
        attn: Any = self.gpt.h[0].attn
        head_dim: int = attn.c_proj.weight.shape[0] // config.n_head  # padded, perhaps
        shape = (2, config.n_head, length, head_dim)
        return [torch.zeros(shape, dtype=self.dtype) for _ in range(len(KEY_VALUE) * config.n_layer)]

    def head(self, x: Tensor) -> Tensor:
        """Map (batch, count, n_embd) to logits (batch, count, vocab_size), reading the token embedding as it lies."""
        wte = self.gpt.wte
        if not isinstance(wte, WideEmbedding):
            return self.matmul_transposed(x, wte.weight)
        common = wte.common(x)  # (batch, count, tail)
        rounded = self.matmul_transposed(torch.cat((x, -common), dim=2), wte.weight)
        return rounded.float() + common[..., :1].float()

    @abstractmethod
    def matmul_transposed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map `x` (batch, count, width) and `weight` (rows, width) to (batch, count, rows)."""


class NativeGraph(FlavouredGraph):
    """Fused attention on fixed buffers; logits of chosen positions."""

    @property
    def example(self) -> tuple[Any, ...]:
        return (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(2, 3, dtype=torch.int64),
            torch.full((2,), 2, dtype=torch.int32),
            torch.tensor(3, dtype=torch.int32),
            torch.zeros(2, 2, dtype=torch.int64),
            self.cache_example(8),
        )

    @property
    def dynamic_shapes(self) -> tuple[Any, ...]:
        batch, seq, count, capacity = _dims(Axis.BATCH, Axis.SEQUENCE, Axis.LOGIT, Axis.CACHE)
        cache = [{0: batch, 2: capacity}] * len(KEY_VALUE) * self.gpt.config.n_layer
        return ({0: batch, 1: seq}, {0: batch, 1: seq}, {0: batch}, None, {0: batch, 1: count}, cache)

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
        x = self.gpt.hidden(input_ids, position_ids, attend=attend, logit_positions=logit_positions)
        return self.head(x), attend.presents

    def matmul_transposed(self, x: Tensor, weight: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], weight.shape[0])
        return torch.onnx.ops.symbolic(
            f"{MICROSOFT}::FusedMatMul", [x, weight], attrs={"transB": 1}, dtype=x.dtype, shape=shape, version=1
        )


class PortableGraph(FlavouredGraph):
    """Standard operators and a cache that grows by concatenation; logits of every position.

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
        batch, seq, past = _dims(Axis.BATCH, Axis.SEQUENCE, Axis.PAST)
        cache = [{0: batch, 2: past}] * len(KEY_VALUE) * self.gpt.config.n_layer
        # torch finds out by itself that the mask is as long as past and new tokens together.
        return ({0: batch, 1: seq}, {0: batch, 1: torch.export.Dim.AUTO}, {0: batch, 1: seq}, cache)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        total, seq = attention_mask.shape[1], input_ids.shape[1]
        slots = torch.arange(total)
        causal = slots[None, :] <= slots[total - seq :, None]  # (seq, total)
        visible = causal & (attention_mask[:, None, :] != 0)  # (batch, seq, total)
        # The lowest number, not -inf: a query that is padding sees nothing at all, and must not become NaN.
        hidden = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype)
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


class WideEmbedding(nn.Module):
    """A float16 token embedding with a few columns more, which let the head round small numbers instead of large ones.

    GPT-2's logits lie near -100, where float16 has only multiples of 1/16. What all tokens have in common there is the
    hidden state times the mean embedding. The head gets its negative as further columns of the hidden state; here
    they meet columns of a constant that add up to 1, within the sum, before it is rounded. It is added back in float32.
    """

    TAIL = 8  # keeps the width a multiple of 8, as GPUs like it

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.n_embd = weight.shape[1]
        tail = torch.full((weight.shape[0], self.TAIL), 1 / self.TAIL, dtype=weight.dtype)
        self.weight = nn.Parameter(torch.cat((weight, tail), dim=1), requires_grad=False)
        mean = weight.float().mean(0).to(weight.dtype)
        self.mean = nn.Parameter(mean[:, None].repeat(1, self.TAIL), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.weight)[..., : self.n_embd]

    def common(self, x: Tensor) -> Tensor:
        """Return what the logits of `x` (batch, count, n_embd) have in common, TAIL times side by side."""
        return x @ self.mean


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


class _GrowingAttention:
    """Attend to past and new tokens by matrix products; `bias` (batch, 1, seq, total) hides what no query may see."""

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
        # Scaled before the product: in float16 it is the product that could overflow.
        scores = (query * scale) @ key.transpose(2, 3) + self.bias  # (batch, n_head, seq, total)
        return merge_heads(torch.softmax(scores, dim=-1) @ value)


def _dims(*names: str) -> tuple[Any, ...]:
    return tuple(torch.export.Dim(name) for name in names)
