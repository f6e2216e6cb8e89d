from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ortgpt_models import GPT, GPTConfig
from ortgpt_models.config import ACTIVATIONS
from ortgpt_models.gpt import merge_heads, split_heads
from support import random_model

SHAPES: list[dict[str, Any]] = [
    {"vocab_size": 101, "n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 4},
    {"vocab_size": 77, "n_positions": 33, "n_embd": 35, "n_layer": 2, "n_head": 5, "n_inner": 50,
     "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True, "layer_norm_epsilon": 1e-3},
    {"vocab_size": 64, "n_positions": 64, "n_embd": 24, "n_layer": 1, "n_head": 1, "activation_function": "relu",
     "scale_attn_weights": False},
    {"vocab_size": 90, "n_positions": 48, "n_embd": 42, "n_layer": 4, "n_head": 3, "activation_function": "silu"},
]  # fmt: skip


class KVCache:
    """Attention to every token since the cache was made; rows of a batch have equal length."""

    def __init__(self, n_head: int) -> None:
        self.n_head = n_head
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # key and value, (batch, n_head, length, head_dim)

    def __call__(self, layer_index: int, qkv: Tensor, scale: float) -> Tensor:
        query, key, value = split_heads(qkv, self.n_head)
        if layer_index in self.layers:
            past_key, past_value = self.layers[layer_index]
            key, value = torch.cat((past_key, key), dim=2), torch.cat((past_value, value), dim=2)
        self.layers[layer_index] = key, value
        new, total = query.shape[2], key.shape[2]
        visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        return merge_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale))


def in_chunks(gpt: GPT, ids: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Return the logits of `ids` in calls that end at `ends`, each after the cache of the calls before it."""
    cache = KVCache(gpt.config.n_head)
    chunks = []
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        chunks.append(gpt(ids[:, start:end], torch.arange(start, end), attend=cache))
    return torch.cat(chunks, dim=1)


def make_pair(shape: dict[str, Any]) -> tuple[GPT, Any]:
    theirs = random_model(3, **shape)
    gpt = GPT(GPTConfig(**shape)).eval()
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    gpt.load_state_dict({name: state[name] for name in gpt.state_dict()})
    return gpt, theirs


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(shape: dict[str, Any]) -> None:
    gpt, theirs = make_pair(shape)
    ids = torch.randint(shape["vocab_size"], (3, shape["n_positions"]))
    assert (gpt(ids) - theirs(ids).logits).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ACTIVATIONS)
@torch.no_grad()
def test_activations_are_those_of_transformers_by_the_same_name(name: str) -> None:
    gpt, theirs = make_pair(SHAPES[0] | {"n_layer": 1, "activation_function": name})
    act = gpt.h[0].mlp.act  # type: ignore[union-attr]
    x = torch.linspace(-12, 12, 4801)
    assert (act(x) - theirs.transformer.h[0].mlp.act(x)).abs().max() <= 2e-6  # type: ignore[operator]
    ids = torch.arange(40)[None]
    assert (gpt(ids) - theirs(ids).logits).abs().max() <= 1e-4


def test_all_activations_of_transformers_are_known_but_those_with_parameters() -> None:
    assert set(ACT2FN) - set(ACTIVATIONS) == {"prelu", "xielu"}


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_cached_steps_equal_full_recomputation(shape: dict[str, Any]) -> None:
    gpt, _ = make_pair(shape)
    ids = torch.randint(shape["vocab_size"], (2, 30))
    assert (in_chunks(gpt, ids, tuple(range(7, 31))) - gpt(ids)).abs().max() <= 1e-4


@pytest.mark.parametrize("ends", [(1, 2, 30), (11, 12, 29, 30), (29, 30)])
@torch.no_grad()
def test_a_prompt_in_chunks_equals_full_recomputation(ends: tuple[int, ...]) -> None:
    gpt, _ = make_pair(SHAPES[0])
    ids = torch.randint(101, (2, 30))
    assert (in_chunks(gpt, ids, ends) - gpt(ids)).abs().max() <= 1e-4


@torch.no_grad()
def test_logit_positions_select_from_all_logits() -> None:
    gpt, _ = make_pair(SHAPES[0])
    ids = torch.randint(101, (2, 9))
    positions = torch.tensor([[0, 8, 3], [5, 5, 1]])
    expected = gpt(ids)[torch.arange(2)[:, None], positions]
    torch.testing.assert_close(gpt(ids, logit_positions=positions), expected)


@torch.no_grad()
def test_a_later_token_changes_no_earlier_logits() -> None:
    gpt, _ = make_pair(SHAPES[0])
    ids = torch.randint(101, (1, 20))
    other = ids.clone()
    other[0, 12] = (other[0, 12] + 1) % 101
    difference = (gpt(ids) - gpt(other)).abs().amax(dim=(0, 2))
    assert difference[:12].max() == 0
    assert difference[12:].min() > 0


def test_initialisation_is_that_of_gpt2() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=2000, n_positions=512, n_embd=256, n_layer=8, n_head=4)
    gpt = GPT(config)
    for name, parameter in gpt.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif ".ln_" in name or name.startswith("ln_f"):
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / (2 * 8) ** 0.5 if name.endswith("c_proj.weight") else 0.02
            standard_error = std / (2 * parameter.numel()) ** 0.5
            assert abs(parameter.std().item() - std) < 5 * standard_error, name
            assert abs(parameter.mean().item()) < 5 * std / parameter.numel() ** 0.5, name
            # A normal distribution has 4.55% beyond two standard deviations.
            assert (parameter.abs() > 2 * std).float().mean().item() == pytest.approx(0.0455, abs=0.004), name


def test_dropout_acts_in_training_only() -> None:
    gpt = GPT(GPTConfig(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    ids = torch.randint(50, (1, 16))
    assert not torch.equal(gpt.train()(ids), gpt(ids))
    assert torch.equal(gpt.eval()(ids), gpt(ids))
