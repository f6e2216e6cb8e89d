"""GPT-1 against `OpenAIGPTLMHeadModel`: configuration, weights by their names, values, initialisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, OpenAIGPTDoubleHeadsModel, OpenAIGPTModel
from transformers.models.openai.modeling_openai import ACT_FNS

from ortgpt_models import GPT, GPTConfig, ModelError, load_gpt, save_gpt
from support import random_model

SHAPE: dict[str, Any] = {"vocab_size": 101, "n_positions": 40, "n_embd": 48, "n_layer": 3, "n_head": 4}


def of_gpt1(**values: Any) -> GPTConfig:
    return GPTConfig.from_dict({"model_type": "openai-gpt"} | values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(5, "openai-gpt", **SHAPE).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@torch.no_grad()
def difference(gpt: GPT, folder: Path) -> float:
    """Return the largest difference of logits from those of `transformers` for the network in `folder`."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(80).view(2, 40) * 7 % 101
    expected = theirs(ids).logits
    assert expected.std() > 0.02
    return float((gpt(ids) - expected).abs().max())


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = change(load_file(path))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})


def test_the_true_size_has_the_published_parameter_count() -> None:
    config = of_gpt1()
    assert config == GPTConfig.from_dict(OpenAIGPTConfig().to_dict())
    with torch.device("meta"):
        gpt = GPT(config)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == 116_534_784


@pytest.mark.parametrize("afn", ACT_FNS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers(afn: str, tied: bool, tmp_path: Path) -> None:
    shape = SHAPE | {"afn": afn, "tie_word_embeddings": tied, "layer_norm_epsilon": 1e-3}
    random_model(6, "openai-gpt", **shape).save_pretrained(tmp_path)
    gpt = load_gpt(tmp_path)
    assert gpt.config.tie_word_embeddings is tied
    assert difference(gpt, tmp_path) <= 1e-5


@pytest.mark.parametrize("afn", ACT_FNS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_folder_opens_in_transformers_with_equal_logits(afn: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = of_gpt1(**SHAPE, afn=afn, tie_word_embeddings=tied, initializer_range=0.2, eos_token_id=3)
    gpt = GPT(config).eval()
    save_gpt(gpt, tmp_path)
    assert GPTConfig.from_dict(json.loads((tmp_path / "config.json").read_text())) == config
    assert difference(gpt, tmp_path) <= 1e-5
    assert difference(load_gpt(tmp_path), tmp_path) <= 1e-5
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert keys == set(random_model(0, "openai-gpt", **SHAPE, tie_word_embeddings=tied).state_dict()) - (
        {"lm_head.weight"} if tied else set()
    )


@pytest.mark.parametrize("kind", ["plain", "bin", "OpenAIGPTModel", "OpenAIGPTDoubleHeadsModel"])
def test_weights_are_found_by_the_names_of_every_writer(folder: Path, kind: str) -> None:
    whole = load_file(folder / "model.safetensors")
    expected = load_gpt(folder).state_dict()
    if kind == "plain":
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(3)}
        rewrite(folder, lambda state: {key.removeprefix("transformer."): state[key] for key in state} | masks)
    elif kind == "bin":
        torch.save({f"module.{key}": value for key, value in whole.items()}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    else:
        writer: Any = {each.__name__: each for each in (OpenAIGPTModel, OpenAIGPTDoubleHeadsModel)}[kind]
        writer.from_pretrained(folder).save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["architectures"] == [kind]
    notes: list[str] = []
    state = load_gpt(folder, on_note=notes.append).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert not [note for note in notes if "architecture" in note]
    assert any("multiple_choice_head" in note for note in notes) == (kind == "OpenAIGPTDoubleHeadsModel")
    assert any("the prefix module. before" in note for note in notes) == (kind == "bin")


def test_a_head_that_equals_the_embedding_is_tied_and_another_is_taken(folder: Path) -> None:
    embedding = "transformer.tokens_embed.weight"
    rewrite(folder, lambda state: state | {"lm_head.weight": state[embedding].clone()})
    assert load_gpt(folder).config.tie_word_embeddings
    rewrite(folder, lambda state: state | {"lm_head.weight": state[embedding].flip(0)})
    gpt = load_gpt(folder)
    assert not gpt.config.tie_word_embeddings
    assert difference(gpt, folder) <= 1e-5
    rewrite(folder, lambda state: {key: state[key] for key in state if key != embedding})
    assert torch.equal(load_gpt(folder).wte.weight, gpt.head.weight)  # the tied head alone is the embedding, too


def test_faults_go_by_the_names_of_the_file(folder: Path) -> None:
    def damage(state: dict[str, Tensor]) -> dict[str, Tensor]:
        del state["transformer.positions_embed.weight"]
        return state | {
            "transformer.tokens_embed.weight": torch.zeros(100, 48),
            "transformer.wpe.weight": torch.zeros(40, 48),
            "transformer.ln_f.weight": torch.zeros(48),
        }

    rewrite(folder, damage)
    with pytest.raises(ModelError) as caught:
        load_gpt(folder)
    for part in (
        "missing positions_embed.weight (40, 48)",
        "transformer.tokens_embed.weight has shape (100, 48), expected (101, 48)",
        "unexpected transformer.wpe.weight",
        "unexpected transformer.ln_f.weight",
    ):
        assert part in str(caught.value)
    rewrite(folder, lambda state: {"model.norm.weight": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"this network, which has tokens_embed\.weight and h\.0\.attn"):
        load_gpt(folder)


def test_names_of_the_other_family_are_refused(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "gpt2"}))
    with pytest.raises(ModelError, match=r"missing wpe\.weight .*missing ln_f\.weight .*unexpected transformer\.tok"):
        load_gpt(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"afn": "gelu_new"}, "afn = 'gelu_new' (accepted: gelu, silu, swish, relu)"),
        ({"afn": None}, "afn = None (accepted"),
        ({"afn": ["gelu"]}, "afn = ['gelu'] (accepted"),
        ({"n_inner": 50}, "n_inner = 50 (accepted: 3072, which is 4 n_embd, with norm 'post', as in GPT-1)"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True (accepted: false with norm 'post'",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights = False (accepted: true with norm 'post'"),
        ({"n_layer": 0}, "n_layer = 0 (accepted"),
    ],
)
def test_what_gpt1_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        of_gpt1(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_post_norm_configuration_that_no_config_json_can_say_is_refused() -> None:
    with pytest.raises(ModelError, match=r"activation_function = 'gelu' \(accepted: gelu_new, silu.* with norm"):
        GPTConfig(norm="post", activation_function="gelu")
    with pytest.raises(ModelError, match=r"norm = 'sandwich' \(accepted: pre, post\)"):
        GPTConfig(norm="sandwich")


def test_the_place_of_the_norm_is_the_model_type_alone() -> None:
    assert GPTConfig.from_dict({"model_type": "gpt2", "norm": "post", "afn": "relu"}) == GPTConfig()
    assert of_gpt1(norm="pre", activation_function="relu") == of_gpt1()
    assert "norm" not in GPTConfig().to_dict()
    assert "norm" not in of_gpt1().to_dict()


def test_initial_weights_are_distributed_as_those_of_transformers() -> None:
    """GPT-1 does not divide the residual projections by √(2 n_layer), as GPT-2 does."""
    shape = {"vocab_size": 900, "n_positions": 200, "n_embd": 128, "n_layer": 6, "n_head": 4}
    torch.manual_seed(0)
    theirs: dict[str, Tensor] = AutoModelForCausalLM.from_config(OpenAIGPTConfig(**shape)).state_dict()
    gpt = GPT(of_gpt1(**shape))
    for name, parameter in gpt.named_parameters():
        key = f"transformer.{name}".replace("wte", "tokens_embed").replace("wpe", "positions_embed")
        expected = theirs[key]
        if parameter.dim() == 1:
            assert torch.equal(parameter, expected), name
            continue
        error = 0.02 / (2 * parameter.numel()) ** 0.5
        for each in (parameter, expected):
            assert abs(each.std().item() - 0.02) < 5 * error, name
            assert abs(each.mean().item()) < 5 * 0.02 / parameter.numel() ** 0.5, name
