"""The network of GPT-2 and GPT-1. Module names are those of a Hugging Face GPT-2 checkpoint, so weights load by name.

Each layer passes query, key and value of the new tokens to an `Attend`, which computes the attention. `FullAttention`
sees the tokens of one call; an exporter passes its own. Knows nothing of files, text or ONNX.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortgpt_models.activations import make_activation
from ortgpt_models.config import PRE, GPTConfig


class Attend(Protocol):
    """Causal attention of the new tokens to themselves, and to earlier tokens if the implementation keeps any."""

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        """Map `qkv`, (batch, seq, 3 × width) with query, key and value side by side, to (batch, seq, width).

        `layer_index` counts from 0; `scale` is the factor on the query-key products.
        """
        ...


class FullAttention:
    """Attend within one call: token i sees the tokens 0 to i. `dropout` is on the attention weights."""

    def __init__(self, n_head: int, dropout: float = 0.0) -> None:
        self.n_head = n_head
        self.dropout = dropout

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        query, key, value = split_heads(qkv, self.n_head)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, dropout_p=self.dropout)
        return merge_heads(out)


def split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split (batch, seq, 3 × width) into query, key and value of (batch, n_head, seq, head_dim) each."""
    batch, seq, width = qkv.shape
    query, key, value = qkv.view(batch, seq, 3, n_head, width // 3 // n_head).permute(2, 0, 3, 1, 4)
    return query, key, value


def merge_heads(x: Tensor) -> Tensor:
    """Turn (batch, n_head, seq, head_dim) into (batch, seq, n_head × head_dim)."""
    batch, n_head, seq, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, seq, n_head * head_dim)


def take_positions(x: Tensor, positions: Tensor | None) -> Tensor:
    """Return (batch, count, width): the `positions`, int64 (batch, count), of (batch, seq, width); all if None."""
    return x if positions is None else x.gather(1, positions[..., None].expand(-1, -1, x.shape[2]))


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (n_in, n_out), as in GPT-2 checkpoints; the bias is (n_out,)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., n_in) to (..., n_out)."""
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """The attention of one layer: project to query, key and value, attend, and project back.

    `c_attn` is (n_embd, 3 × n_embd), with query, key and value side by side; `c_proj` is (n_embd, n_embd).
    """

    def __init__(self, config: GPTConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.scale = config.attention_scale(layer_index)
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        """Map (batch, seq, n_embd) to (batch, seq, n_embd), or to the `positions` alone (see take_positions)."""
        qkv = self.c_attn(x)  # (batch, seq, 3 × n_embd)
        out: Tensor = self.resid_dropout(
            self.c_proj(take_positions(attend(self.layer_index, qkv, self.scale), positions))
        )
        return out


class MLP(nn.Module):
    """The MLP of one layer: `c_fc` (n_embd, inner_dim), the activation, `c_proj` (inner_dim, n_embd)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner_dim)
        self.act = make_activation(config.activation_function)
        self.c_proj = Conv1D(config.inner_dim, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to (batch, seq, n_embd)."""
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return out


class Block(nn.Module):
    """One layer: attention, then MLP, each added to the residual stream.

    A LayerNorm comes before each of them (pre-norm), or after each addition (post-norm).
    """

    def __init__(self, config: GPTConfig, layer_index: int) -> None:
        super().__init__()
        self.is_pre_norm = config.norm == PRE
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer_index)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
        """Map (batch, seq, n_embd) to (batch, seq, n_embd), or to the `positions` alone, which still see all tokens."""
        out: Tensor
        if self.is_pre_norm:
            x = take_positions(x, positions) + self.attn(self.ln_1(x), attend, positions)
            out = x + self.mlp(self.ln_2(x))
        else:
            x = self.ln_1(take_positions(x, positions) + self.attn(x, attend, positions))
            out = self.ln_2(x + self.mlp(x))
        return out


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019), or with post-norm GPT-1 (Radford et al. 2018), with the language-model head.

    The head is the token embedding, or the layer `lm_head` if the configuration does not tie the two.

    Initial weights are N(0, initializer_range), biases 0, LayerNorm (1, 0). With pre-norm, residual projections are
    divided by √(2 n_layer), as in GPT-2; GPT-1 does not scale them. `residual_scaling` says otherwise for either.
    """

    def __init__(self, config: GPTConfig, *, residual_scaling: bool | None = None) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        is_pre_norm = config.norm == PRE
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon) if is_pre_norm else nn.Identity()
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._init_weights(is_pre_norm if residual_scaling is None else residual_scaling)

    @property
    def head(self) -> nn.Embedding | nn.Linear:
        """The module whose `weight`, (vocab_size, n_embd), maps the last hidden state to logits."""
        return self.wte if self.config.tie_word_embeddings else self.lm_head

    def untie_head(self) -> None:
        """Give the network a head of its own, with the values of the token embedding."""
        self.config = replace(self.config, tie_word_embeddings=False)
        self.lm_head = nn.Linear(self.config.n_embd, self.config.vocab_size, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(self.wte.weight.detach().clone())

    def _init_weights(self, residual_scaling: bool) -> None:
        std = self.config.initializer_range
        residual_std = std / (2 * self.config.n_layer) ** 0.5 if residual_scaling else std
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attend: Attend | None = None,
        logit_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token, (batch, seq or logit_count, vocab_size).

        `input_ids` and `position_ids` are int64 (batch, seq); `position_ids` default to 0 to seq - 1. `attend` defaults
        to FullAttention. `logit_positions`, int64 (batch, logit_count), are the indices within seq whose logits are
        computed (default: all).
        """
        x = self.hidden(input_ids, position_ids, attend=attend, logit_positions=logit_positions)
        return F.linear(x, self.head.weight)

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attend: Attend | None = None,
        logit_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head, (batch, seq or logit_count, n_embd); arguments as in forward()."""
        if attend is None:
            attend = FullAttention(self.config.n_head, self.config.attn_pdrop if self.training else 0.0)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.wte(input_ids) + self.wpe(position_ids))  # (batch, seq, n_embd)
        last = len(self.h) - 1
        for index, block in enumerate(self.h):
            # After the last attention, only the positions whose logits are wanted are computed.
            x = block(x, attend, logit_positions if index == last else None)
        out: Tensor = self.ln_f(x)
        return out
