"""Wrap a classifier in modules that torch can export, one for each flavour. Knows no files.

The graph has no cache: it sees whole texts, and `attention_mask` tells their tokens from padding. A text's logits are
those of its last token, which causal attention lets see the whole text.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ortgpt.contract import Axis, Flavour
from ortgpt_exporter.graph.torch_modules import ATTENTION, MICROSOFT, dims
from ortgpt_models import GPTClassifier
from ortgpt_models.gpt import merge_heads, split_heads


class ClassifierGraph(nn.Module):
    """The module that torch exports: input_ids and attention_mask, both int64 (batch, seq), to float32 logits.

    The body computes in the type of its weights, float32 or float16. The head is small, and computes in float32.
    """

    def __init__(self, classifier: GPTClassifier) -> None:
        super().__init__()
        self.gpt = classifier.gpt
        self.pools = not classifier.config.labels_tokens
        head = nn.Linear(1, 1)  # holds the tensors under their names in a checkpoint
        head.weight, head.bias = classifier.weight, classifier.bias  # type: ignore[assignment]  # a head may have none
        self.add_module(classifier.config.head_name, head)
        self._head = [head]  # in a list, or torch would know it by two names

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """Arguments of forward() for torch to trace: two rows of three tokens, since torch takes 1 for a constant."""
        return torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)

    @property
    def dynamic_shapes(self) -> tuple[Any, ...]:
        """The dynamic axes of each argument of forward()."""
        batch, seq = dims(Axis.BATCH, Axis.SEQUENCE)
        return ({0: batch, 1: seq},) * 2

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return (batch, num_labels), or (batch, seq, num_labels) where each token has a label."""
        last = self.last_positions(attention_mask)[:, None] if self.pools else None
        x = self.hidden(input_ids, attention_mask, last).float()  # (batch, 1 or seq, n_embd)
        logits = self._logits(x.reshape(-1, x.shape[2]))
        return logits if self.pools else logits.view(x.shape[0], x.shape[1], -1)

    def _logits(self, rows: Tensor) -> Tensor:
        (head,) = self._head
        inputs = [rows, head.weight] if head.bias is None else [rows, head.weight, head.bias]
        shape = (rows.shape[0], head.weight.shape[0])
        return torch.onnx.ops.symbolic("Gemm", inputs, attrs={"transB": 1}, dtype=rows.dtype, shape=shape, version=13)

    @abstractmethod
    def last_positions(self, attention_mask: Tensor) -> Tensor:
        """Return the position of each row's last token, (batch,)."""

    @abstractmethod
    def hidden(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor | None) -> Tensor:
        """Return the input of the head at the `positions` (batch, count), or at all: (batch, count or seq, n_embd)."""


class NativeClassifier(ClassifierGraph):
    """The native flavour: fused attention. Rows are padded on the right, where no token of a text sees padding."""

    def last_positions(self, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(1) - 1

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor | None) -> Tensor:
        config, (batch, seq) = self.gpt.config, input_ids.shape
        lengths = [self.last_positions(attention_mask).to(torch.int32), torch.full((), seq, dtype=torch.int32)]
        # A row may be padded beyond n_positions; what is computed there is thrown away.
        position_ids = torch.arange(seq).clamp(max=config.n_positions - 1).expand(batch, -1)
        attend = _PromptAttention(config.n_head, lengths)
        return self.gpt.hidden(input_ids, position_ids, attend=attend, logit_positions=positions)


class PortableClassifier(ClassifierGraph):
    """The portable flavour: standard operators; rows are padded on either side. Tensors are those of Optimum."""

    def last_positions(self, attention_mask: Tensor) -> Tensor:
        # Not an ArgMax, which ONNX Runtime lacks for int64.
        return (attention_mask * torch.arange(attention_mask.shape[1])).amax(1)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor | None) -> Tensor:
        gpt, slots = self.gpt, torch.arange(input_ids.shape[1])
        dtype = gpt.wte.weight.dtype
        causal = slots[None, :] <= slots[:, None]  # (seq, seq)
        visible = causal & (attention_mask[:, None, :] != 0)  # (batch, seq, seq)
        # Not -inf: every position is hidden from a query that is padding, and -inf gives NaN there. Half of the lowest
        # number, so that the sum with a negative score is not -inf in float16, either.
        hidden = torch.full((), torch.finfo(dtype).min / 2, dtype=dtype)
        bias = torch.where(visible, torch.zeros((), dtype=dtype), hidden)[:, None]
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
        attend = _MaskedAttention(gpt.config.n_head, bias)
        return gpt.hidden(input_ids, position_ids, attend=attend, logit_positions=positions)


class _PromptAttention:
    """Emit one com.microsoft::GroupQueryAttention per layer, without a past.

    Its presents are not used, but ONNX Runtime 1.23 refuses a node that does not name them.
    """

    def __init__(self, n_head: int, lengths: list[Tensor]) -> None:
        """Take seqlens_k and total_sequence_length, as in the contract."""
        self.n_head = n_head
        self.lengths = lengths

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        batch, seq, width = qkv.shape
        present = (batch, self.n_head, seq, width // 3 // self.n_head)
        out: Tensor = torch.onnx.ops.symbolic_multi_out(
            f"{MICROSOFT}::{ATTENTION}",
            [qkv, None, None, None, None, *self.lengths],  # query holds key and value too
            attrs={"num_heads": self.n_head, "kv_num_heads": self.n_head, "scale": scale},
            dtypes=[qkv.dtype] * 3,
            shapes=[(batch, seq, width // 3), present, present],
            version=1,
        )[0]
        return out


class _MaskedAttention:
    """Attend by matrix products; `bias` (batch, 1, seq, seq) hides positions from queries."""

    def __init__(self, n_head: int, bias: Tensor) -> None:
        self.n_head = n_head
        self.bias = bias

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        query, key, value = split_heads(qkv, self.n_head)
        # Scaled before the product, which could overflow in float16.
        scores = (query * scale) @ key.transpose(2, 3) + self.bias  # (batch, n_head, seq, seq)
        return merge_heads(torch.softmax(scores, dim=-1) @ value)


CLASSIFIER_GRAPHS: dict[str, type[ClassifierGraph]] = {
    Flavour.NATIVE: NativeClassifier,
    Flavour.PORTABLE: PortableClassifier,
}
