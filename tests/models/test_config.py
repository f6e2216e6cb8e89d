from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config

from ortgpt_models import GPT, GPTConfig, ModelError
from ortgpt_models.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt1", 116_534_784),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_parameter_counts(name: str, count: int) -> None:
    with torch.device("meta"):
        gpt = GPT(PRESETS[name])
    assert sum(parameter.numel() for parameter in gpt.parameters()) == count


def test_minigpt_preset_has_its_shape() -> None:
    config = PRESETS["minigpt"]
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (6, 256, 4, 256)


def test_defaults_equal_those_of_transformers() -> None:
    assert GPTConfig.from_dict(GPT2Config().to_dict()) == GPTConfig()


# config.json of distilgpt2 and of microsoft/DialoGPT-medium on the hub, beside the keys of the network.
OF_DISTILGPT2: dict[str, Any] = {
    "_num_labels": 1, "architectures": ["GPT2LMHeadModel"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    "model_type": "gpt2", "n_ctx": 1024, "n_layer": 6, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
OF_DIALOGPT: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 1024,
    "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_positions": 1024, "n_special": 0, "predict_special_tokens": True,
    "summary_activation": None, "summary_type": "cls_index", "torch_dtype": "float16", "use_cache": True,
    "reorder_and_upcast_attn": True, "task_specific_params": {"conversational": {"max_length": 1000}},
}  # fmt: skip


@pytest.mark.parametrize(("values", "n_layer"), [(OF_DISTILGPT2, 6), (OF_DIALOGPT, 24)])
def test_configs_of_the_hub_are_read(values: dict[str, Any], n_layer: int) -> None:
    theirs = GPT2Config(**values)
    ours = GPTConfig.from_dict(values)
    assert ours.n_layer == n_layer
    assert ours.norm == "pre"
    assert all(getattr(theirs, name) == value for name, value in vars(ours).items() if name != "norm")


def test_config_survives_a_round_trip() -> None:
    config = GPTConfig(n_embd=60, n_head=5, n_layer=3, n_inner=77, activation_function="silu", eos_token_id=None,
                       tie_word_embeddings=False)  # fmt: skip
    assert GPTConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt_neo"),
        ("tie_word_embeddings", "no"),
        ("add_cross_attention", True),
        ("quantization_config", {"bits": 4}),
        ("pruned_heads", {"0": [1]}),
        ("activation_function", "prelu"),
        ("activation_function", "xielu"),
        ("activation_function", "geglu"),
        ("activation_function", None),
        ("n_layer", 0),
        ("n_layer", 10**6),
        ("n_embd", 10**12),
        ("vocab_size", 10**30),
        ("n_layer", True),
        ("n_embd", "768"),
        ("n_head", 7),
        ("n_inner", -1),
        ("layer_norm_epsilon", float("nan")),
        ("resid_pdrop", 1.5),
        ("scale_attn_weights", 1),
        ("eos_token_id", [0, 1.5]),
        ("eos_token_id", "0"),
        ("bos_token_id", True),
    ],
)
def test_unsupported_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=key) as caught:
        GPTConfig.from_dict(GPT2Config().to_dict() | {key: value})
    assert "accepted" in str(caught.value)


def test_sizes_may_go_by_the_names_that_transformers_also_reads() -> None:
    values = {"hidden_size": 60, "num_attention_heads": 5, "num_hidden_layers": 3, "max_position_embeddings": 40}
    theirs = GPT2Config(**values)
    ours = GPTConfig.from_dict(values)
    assert (ours.n_embd, ours.n_head, ours.n_layer, ours.n_positions) == (60, 5, 3, 40)
    assert (theirs.n_embd, theirs.n_head, theirs.n_layer, theirs.n_positions) == (60, 5, 3, 40)
    assert GPTConfig.from_dict(values | {"n_embd": 60}).n_embd == 60
    with pytest.raises(ModelError, match="n_embd = 768 and 60"):
        GPTConfig.from_dict(values | {"n_embd": 768})


def test_all_faults_come_in_one_message() -> None:
    with pytest.raises(ModelError, match=r"n_layer = 0.*n_positions = 'x'|n_positions = 'x'.*n_layer = 0"):
        GPTConfig(n_layer=0, n_positions="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "inverse", "expected"),
    [(True, False, 0.125), (False, False, 1.0), (True, True, 0.125 / 4), (False, True, 0.25)],
)
def test_attention_scale(weights: bool, inverse: bool, expected: float) -> None:
    config = GPTConfig(scale_attn_weights=weights, scale_attn_by_inverse_layer_idx=inverse)
    assert config.attention_scale(3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "token_id"), [(7, 7), (None, None), (-1, None), ([5, 7], 5), ([-1, 7], 7), ([], None)]
)
def test_of_several_special_ids_the_first_is_taken_and_a_negative_one_is_none(value: Any, token_id: int | None) -> None:
    assert GPTConfig.from_dict({"eos_token_id": value}).eos_token_id == token_id
