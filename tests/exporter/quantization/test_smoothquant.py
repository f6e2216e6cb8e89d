"""Smoothing must change no logit, and remove the outliers that make GPT-2 hard to round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ortgpt_exporter.quantization.smoothquant import smooth
from ortgpt_models import GPT, GPTConfig
from outliers import inject

CONFIG = GPTConfig(vocab_size=60, n_positions=32, n_embd=48, n_layer=2, n_head=4)


POST = replace(CONFIG, norm="post")


def make_gpt(config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(3)
    gpt = GPT(config).eval()
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.normal_(1.0 if ".ln_" in name and name.endswith("weight") else 0.0, 0.2)
    return gpt


def smoothed(gpt: GPT, min_factor: float = 4.0) -> dict[str, Any]:
    weights = {name: tensor.numpy().copy() for name, tensor in gpt.state_dict().items()}
    smooth(weights, n_layer=CONFIG.n_layer, norm=gpt.config.norm, min_factor=min_factor)
    return weights


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "kind"), [(CONFIG, "none"), (CONFIG, "norm"), (CONFIG, "value"), (POST, "none"), (POST, "value")]
)
@pytest.mark.parametrize("min_factor", [1.0, 4.0])
def test_no_logit_changes(config: GPTConfig, kind: str, min_factor: float) -> None:
    gpt = make_gpt(config)
    if kind != "none":
        inject(gpt, kind, count=2)
    ids = torch.arange(32)[None] * 7 % 60
    before = gpt(ids)
    changed = {name: torch.from_numpy(array) for name, array in smoothed(gpt, min_factor).items()}
    assert kind == "none" or any(not torch.equal(gpt.state_dict()[name], changed[name]) for name in changed)
    gpt.load_state_dict(gpt.state_dict() | changed)
    assert (gpt(ids) - before).abs().max() <= 1e-4 * before.abs().max()


@pytest.mark.parametrize(("config", "kind"), [(CONFIG, "norm"), (CONFIG, "value"), (POST, "value")])
@pytest.mark.parametrize("factor", [64.0, 1000.0, 1 / 64])
def test_an_injected_outlier_is_removed_and_nothing_else_changes(config: GPTConfig, kind: str, factor: float) -> None:
    plain, odd = make_gpt(config), make_gpt(config)
    inject(odd, kind, factor=factor, count=2)
    found = smoothed(odd)
    for name, tensor in plain.state_dict().items():
        if name.startswith("h."):
            change = np.abs(np.log2(found[name] / tensor.numpy()))
            assert change.max() <= 2.5, name  # from a factor of 2^6 or 2^10
            assert np.count_nonzero(change > 0.01) <= 2 * change.size // 48, name


@pytest.mark.parametrize("config", [CONFIG, POST])
def test_a_network_without_odd_channels_is_unchanged(config: GPTConfig) -> None:
    gpt = make_gpt(config)
    state = gpt.state_dict()
    assert all(np.array_equal(array, state[name].numpy()) for name, array in smoothed(gpt).items())


def test_with_post_norm_the_values_alone_are_scaled() -> None:
    gpt = make_gpt(POST)
    state = gpt.state_dict()
    changed = {name for name, array in smoothed(gpt, 1.0).items() if not np.array_equal(array, state[name].numpy())}
    parts = ("c_attn.weight", "c_attn.bias", "c_proj.weight")
    assert changed == {f"h.{layer}.attn.{part}" for layer in range(2) for part in parts}


def test_the_first_layer_of_a_post_norm_network_reads_the_size_of_the_embeddings() -> None:
    """One channel of the embeddings is much larger, and the values read it as much less: nothing is odd."""
    gpt = make_gpt(POST)
    before = smoothed(gpt, 1.0)
    with torch.no_grad():
        for name in ("wte.weight", "wpe.weight"):
            gpt.get_parameter(name)[:, 5] *= 256
        gpt.get_parameter("h.0.attn.c_attn.weight")[5] /= 256
    after = smoothed(gpt, 1.0)
    name = "h.0.attn.c_proj.weight"
    assert np.abs(after[name] / before[name] - 1).max() < 1e-4


def test_channels_of_zeros_are_unchanged() -> None:
    gpt = make_gpt()
    with torch.no_grad():
        gpt.get_parameter("h.0.ln_1.weight")[3] = gpt.get_parameter("h.0.ln_1.bias")[3] = 0.0
        gpt.get_parameter("h.1.mlp.c_fc.weight")[4] = 0.0
    weights = smoothed(gpt)
    assert all(np.isfinite(array).all() for array in weights.values())
    assert weights["h.0.ln_1.weight"][3] == 0
    before = gpt.state_dict()["h.0.attn.c_attn.weight"]
    assert np.array_equal(weights["h.0.attn.c_attn.weight"][3, :96], before[3, :96])
    assert weights["h.1.ln_2.weight"][4] == gpt.state_dict()["h.1.ln_2.weight"][4]
