from __future__ import annotations

import math
from typing import Any

import pytest

from ortgpt_models import ModelError
from ortgpt_models.presets import LEARNING_RATES, PRESETS
from ortgpt_models.training_config import TrainingConfig

SIZES = ("norm", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size")


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0)
    assert [config.learning_rate_at(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert config.learning_rate_at(60) == pytest.approx(0.5)
    assert config.learning_rate_at(109) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_preset_sets_the_shape_and_the_learning_rate(preset: str | None) -> None:
    config, shape = TrainingConfig(preset=preset).resolved(), PRESETS[preset or "minigpt"]
    made = config.gpt_config(end_of_text_id=3)
    assert [getattr(made, name) for name in SIZES] == [getattr(shape, name) for name in SIZES]
    assert [getattr(config, name) for name in SIZES] == [getattr(shape, name) for name in SIZES]
    assert (made.bos_token_id, made.eos_token_id) == (3, 3)
    assert (made.resid_pdrop, made.embd_pdrop, made.attn_pdrop, config.dropout) == (0.1, 0.1, 0.0, 0.1)
    assert config.learning_rate == LEARNING_RATES[preset or "minigpt"]
    assert config.window == shape.n_positions
    assert config.resolved() == config


def test_the_default_is_what_it_always_was() -> None:
    config = TrainingConfig().resolved()
    sizes = (config.n_layer, config.n_head, config.n_embd, config.n_positions, config.vocab_size)
    assert sizes == (6, 4, 256, 256, 4096)
    assert (config.learning_rate, config.dropout, config.steps, config.batch_size) == (1.5e-3, 0.1, 2000, 16)


@pytest.mark.parametrize(
    ("name", "value"),
    [("norm", "post"), ("n_layer", 3), ("n_head", 8), ("n_embd", 512), ("n_positions", 99), ("vocab_size", 999)],
)
def test_a_single_value_replaces_that_of_the_preset(name: str, value: Any) -> None:
    made = TrainingConfig(**{"preset": "minigpt", name: value}).gpt_config(end_of_text_id=0)
    shape = PRESETS["minigpt"]
    expected = {each: value if each == name else getattr(shape, each) for each in SIZES}
    assert {each: getattr(made, each) for each in SIZES} == expected


def test_unusable_configurations_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"vocab_size = 100.*steps = 0.*learning_rate = 0"):
        TrainingConfig(vocab_size=100, steps=0, learning_rate=0.0)
    with pytest.raises(ModelError, match="seed = 4294967296"):
        TrainingConfig(seed=2**32)
    with pytest.raises(ModelError, match="n_embd = 30 with n_head = 4"):
        TrainingConfig(n_embd=30)
    for name in ("n_layer", "n_head", "n_embd", "n_positions", "window", "gradient_accumulation_steps"):
        for value in (0, -1):
            with pytest.raises(ModelError, match=rf"unusable .*: {name} = {value} \(accepted: 1 or more\)$"):
                TrainingConfig(**{name: value})  # type: ignore[arg-type]  # all of them are integers
    with pytest.raises(
        ModelError, match=r"preset = gpt3 \(accepted: minigpt, gpt1, gpt2, gpt2-medium, .*\); norm = no"
    ):
        TrainingConfig(preset="gpt3", norm="no")
    with pytest.raises(ModelError, match=r"device = tpu \(accepted: auto, cpu, cuda\)"):
        TrainingConfig(device="tpu")


def test_a_window_is_no_longer_than_the_context() -> None:
    assert TrainingConfig(window=256).resolved().window == 256
    assert TrainingConfig(window=8).resolved_from(9, 1e-5).window == 8
    assert TrainingConfig().resolved_from(9, 1e-5).window == 9
    with pytest.raises(ModelError, match=r"window = 257 \(accepted: at most the context, n_positions = 256\)"):
        TrainingConfig(window=257).resolved()
    with pytest.raises(ModelError, match="window = 10 "):
        TrainingConfig(window=10).resolved_from(9, 1e-5)


def test_a_checkpoint_to_start_from_has_the_shape() -> None:
    config = TrainingConfig(steps=5, dropout=0.0).resolved_from(64, 3e-5)
    assert (config.learning_rate, config.dropout, config.n_layer, config.preset) == (3e-5, 0.0, None, None)
    assert TrainingConfig(learning_rate=1.0).resolved_from(64, 3e-5).learning_rate == 1.0
    values: dict[str, Any] = {"preset": "gpt2", "norm": "pre", "n_layer": 3, "n_head": 4, "n_embd": 256,
              "n_positions": 64, "vocab_size": 999, "residual_scaling": False}  # fmt: skip
    for name, value in values.items():
        with pytest.raises(ModelError, match=f"^{name} = {value} would have no effect: a checkpoint to start from has"):
            TrainingConfig(**{name: value}).resolved_from(64, 3e-5)
