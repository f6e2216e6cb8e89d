from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ortgpt_models import ModelError, load_gpt
from ortgpt_models.starting_point import trainable
from support import write_checkpoint


def test_a_copy_to_train_shares_no_memory_with_the_loaded_network(tmp_path: Path) -> None:
    loaded = load_gpt(write_checkpoint(tmp_path / "base"))
    copy = trainable(loaded)
    for name, weight in copy.named_parameters():
        original = loaded.get_parameter(name)
        assert torch.equal(weight, original)
        assert weight.requires_grad
        assert weight.data_ptr() != original.data_ptr()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(copy.eval()(ids), loaded(ids))


@pytest.mark.parametrize(
    ("dropout", "expected"),
    [(None, {"embd_pdrop": 0.1, "resid_pdrop": 0.2, "attn_pdrop": 0.3}),
     (0.0, {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}),
     (0.4, {"embd_pdrop": 0.4, "resid_pdrop": 0.4, "attn_pdrop": 0.0})],
)  # fmt: skip
def test_a_copy_to_train_has_the_dropout_asked_for_or_the_checkpoints(
    dropout: float | None, expected: dict[str, float], tmp_path: Path
) -> None:
    loaded = load_gpt(write_checkpoint(tmp_path / "base", embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3))
    copy = trainable(loaded, dropout)
    assert {name: getattr(copy.config, name) for name in expected} == expected
    rates = {name: module.p for name, module in copy.named_modules() if isinstance(module, nn.Dropout)}
    assert rates.pop("drop") == expected["embd_pdrop"]
    assert set(rates.values()) == {expected["resid_pdrop"]}
    assert len(rates) == 2 * copy.config.n_layer
    # The dropout on the attention weights, which is no module, is at work in training alone.
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        same = torch.equal(copy.train()(ids), copy(ids))
    assert same == (dropout == 0.0)


def test_a_dropout_out_of_range_is_refused(tmp_path: Path) -> None:
    loaded = load_gpt(write_checkpoint(tmp_path / "base"))
    with pytest.raises(ModelError, match=r"resid_pdrop = 1\.0 \(accepted: a number from 0 to below 1\)"):
        trainable(loaded, 1.0)
