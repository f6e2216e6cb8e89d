from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortgpt_models import ModelError, load_nanogpt

ARGS: dict[str, Any] = {
    "n_layer": 3, "n_head": 4, "n_embd": 48, "block_size": 32, "bias": True, "vocab_size": 70, "dropout": 0.1,
}  # fmt: skip


class Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        out = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight
        return out if self.bias is None else out + self.bias


class NanoBlock(nn.Module):
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        width, bias = args["n_embd"], args["bias"]
        self.n_head, self.new_gelu = args["n_head"], args.get("new_gelu", False)
        self.ln_1, self.ln_2 = Norm(width, bias), Norm(width, bias)
        self.attn = nn.ModuleDict({
            "c_attn": nn.Linear(width, 3 * width, bias=bias), "c_proj": nn.Linear(width, width, bias=bias)
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(width, 4 * width, bias=bias), "c_proj": nn.Linear(4 * width, width, bias=bias)
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        query, key, value = self.attn["c_attn"](self.ln_1(x)).split(width, dim=2)
        heads = [part.view(batch, seq, self.n_head, -1).transpose(1, 2) for part in (query, key, value)]
        scores = heads[0] @ heads[1].transpose(2, 3) / math.sqrt(width // self.n_head)
        scores = scores.masked_fill(torch.ones(seq, seq).tril() == 0, float("-inf"))
        attended = (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.attn["c_proj"](attended)
        hidden = self.mlp["c_fc"](self.ln_2(x))
        if self.new_gelu:
            hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        else:
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        out: Tensor = x + self.mlp["c_proj"](hidden)
        return out


class NanoGPT(nn.Module):
    """nanoGPT's network, written anew from what its model.py computes: the oracle."""

    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(args["vocab_size"], args["n_embd"]),
            "wpe": nn.Embedding(args["block_size"], args["n_embd"]),
            "h": nn.ModuleList(NanoBlock(args) for _ in range(args["n_layer"])),
            "ln_f": Norm(args["n_embd"], args["bias"]),
        })  # fmt: skip
        self.lm_head = nn.Linear(args["n_embd"], args["vocab_size"], bias=False)
        wte = self.transformer["wte"]
        assert isinstance(wte, nn.Embedding)
        self.lm_head.weight = wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x)
        return F.linear(self.transformer["ln_f"](x), self.lm_head.weight)


def make(**args: Any) -> NanoGPT:
    torch.manual_seed(9)
    model = NanoGPT(ARGS | args).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.2)
            else:
                parameter.normal_(0.0, 0.25)
    return model


def write(path: Path, state: dict[str, Any], **changes: Any) -> Path:
    """Write a checkpoint as nanoGPT's train.py has it; None for a change leaves the key out of model_args."""
    args = {key: value for key, value in (ARGS | changes).items() if value is not None}
    optimizer = {"state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}
    config = {"out_dir": "out", "compile": True, "learning_rate": 6e-4}
    checkpoint = {"model": state, "optimizer": optimizer, "model_args": args, "iter_num": 5, "config": config}
    torch.save(checkpoint | {"best_val_loss": torch.tensor(3.5)}, path)
    return path


@torch.no_grad()
def assert_same(path: Path, model: NanoGPT, **options: Any) -> None:
    gpt = load_nanogpt(path, **options)
    ids = torch.arange(32)[None] * 11 % 70
    assert (gpt(ids) - model(ids)).abs().max() <= 1e-4
    assert model(ids).abs().max() > 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_logits_equal_those_of_nanogpt(tmp_path: Path, bias: bool, prefix: str) -> None:
    model = make(bias=bias)
    state = {prefix + key: value for key, value in model.state_dict().items()}
    assert f"{prefix}lm_head.weight" in state
    assert_same(write(tmp_path / "ckpt.pt", state, bias=bias), model)


def test_what_the_configuration_becomes(tmp_path: Path) -> None:
    config = load_nanogpt(write(tmp_path / "ckpt.pt", make().state_dict())).config
    assert (config.n_layer, config.n_head, config.n_embd, config.n_positions, config.vocab_size) == (3, 4, 48, 32, 70)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert (config.activation_function, config.layer_norm_epsilon, config.resid_pdrop) == ("gelu", 1e-5, 0.1)


def test_new_gelu_of_early_2023_on_request(tmp_path: Path) -> None:
    model = make(new_gelu=True)
    path = write(tmp_path / "ckpt.pt", model.state_dict())
    assert_same(path, model, activation_function="gelu_new")
    with pytest.raises(AssertionError):
        assert_same(path, model)


def test_early_checkpoints_with_masks_and_without_a_bias_entry(tmp_path: Path) -> None:
    model = make()
    masks = {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 32, 32).tril() for layer in range(3)}
    assert_same(write(tmp_path / "ckpt.pt", model.state_dict() | masks, bias=None, dropout=None), model)


def test_a_padded_vocabulary_keeps_its_rows(tmp_path: Path) -> None:
    model = make(vocab_size=50304, n_layer=1)
    path = write(tmp_path / "ckpt.pt", model.state_dict(), vocab_size=50304, n_layer=1)
    assert torch.equal(load_nanogpt(path).wte.weight, model.state_dict()["transformer.wte.weight"])
    assert_same(path, model)


@pytest.mark.parametrize("legacy", [False, True])
def test_half_precision_numpy_numbers_and_the_old_format(tmp_path: Path, legacy: bool) -> None:
    model = make().to(torch.bfloat16).float()
    state = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    path = write(tmp_path / "ckpt.pt", state, n_layer=np.int64(3), vocab_size=np.int32(70))
    checkpoint = torch.load(path, weights_only=False) | {"best_val_loss": np.float32(3.5), "iter_num": np.int64(5)}
    torch.save(checkpoint, path, _use_new_zipfile_serialization=not legacy)
    assert_same(path, model)


def test_every_fault_of_the_tensors_is_named_at_once(tmp_path: Path) -> None:
    state = make().state_dict()
    weight = state.pop("transformer.h.1.attn.c_attn.weight")
    state |= {
        "transformer.h.2.attn.c_attn.weight": weight.T.contiguous(),
        "transformer.h.0.mlp.c_fc.bias": torch.ones(192, dtype=torch.int32),
        "transformer.h.3.ln_1.weight": torch.ones(48),
        "ln_f.weight": torch.ones(48),
    }
    with pytest.raises(ModelError) as caught:
        load_nanogpt(write(tmp_path / "ckpt.pt", state))
    for part in (
        "missing h.1.attn.c_attn.weight",
        "transformer.h.2.attn.c_attn.weight has shape (48, 144), expected (144, 48)",
        "transformer.h.0.mlp.c_fc.bias has dtype int32",
        "unexpected transformer.h.3.ln_1.weight",
        "ln_f.weight occurs twice, as transformer.ln_f.weight and ln_f.weight",
    ):
        assert part in str(caught.value)


def test_biases_that_model_args_denies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unexpected transformer\.ln_f\.bias \(model_args has bias = False\)"):
        load_nanogpt(write(tmp_path / "ckpt.pt", make().state_dict(), bias=False))
    with pytest.raises(ModelError, match=r"missing ln_f\.bias"):
        load_nanogpt(write(tmp_path / "ckpt.pt", make(bias=False).state_dict(), bias=True))


@pytest.mark.parametrize("bias", [True, False])
def test_an_untied_head_and_one_beside_it(tmp_path: Path, bias: bool) -> None:
    model = make(bias=bias)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    state = {f"module.{key}": value for key, value in model.state_dict().items()} | {"v_head.bias": torch.ones(1)}
    path = write(tmp_path / "ckpt.pt", state, bias=bias)
    assert_same(path, model)
    notes: list[str] = []
    assert not load_nanogpt(path, on_note=notes.append).config.tie_word_embeddings
    assert len(notes) == 2
    assert "the prefix module. before" in notes[0]
    assert "v_head.bias" in notes[1]


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = make().state_dict()
    spoilt = state["transformer.wpe.weight"] / 0
    with pytest.raises(ModelError, match=r"transformer\.wpe\.weight holds NaN or infinity"):
        load_nanogpt(write(tmp_path / "ckpt.pt", state | {"transformer.wpe.weight": spoilt}))


def test_unusable_model_args_are_named_at_once(tmp_path: Path) -> None:
    state = make().state_dict()
    with pytest.raises(ModelError, match="model_args has no n_head; model_args has no block_size"):
        load_nanogpt(write(tmp_path / "ckpt.pt", state, n_head=None, block_size=None))
    with pytest.raises(ModelError, match=r"bias = 'yes' \(accepted: True, False\)"):
        load_nanogpt(write(tmp_path / "ckpt.pt", state, bias="yes"))
    with pytest.raises(ModelError, match=r"block_size is n_positions.*n_positions = 'x'.*n_layer = 0"):
        load_nanogpt(write(tmp_path / "ckpt.pt", state, n_layer=0, block_size="x"))


@pytest.mark.parametrize(
    ("content", "description"),
    [
        ({"state_dict": {}, "model": {}}, "'state_dict', 'model'"),
        ({"model": {}, "model_args": 3}, "'model', 'model_args'"),
        ([1], "a list"),
        ({}, "a mapping with no keys"),
        (torch.ones(2), "a Tensor"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: Any, description: str) -> None:
    path = tmp_path / "ckpt.pt"
    torch.save(content, path)
    with pytest.raises(ModelError, match=rf"holds .*{description}.*expected a nanoGPT checkpoint"):
        load_nanogpt(path)


def test_a_model_that_holds_more_than_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'epoch' is a int"):
        load_nanogpt(write(tmp_path / "ckpt.pt", make().state_dict() | {"epoch": 1}))
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load_nanogpt(tmp_path / "nowhere.pt")


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    state = make().state_dict()
    path = write(tmp_path / "ckpt.pt", state | {"x": Hostile(tmp_path / "trap")})
    with pytest.raises(ModelError, match=r"asks for posix\.mkdir beside its tensors; code in a pickle is never run"):
        load_nanogpt(path)
    assert not (tmp_path / "trap").exists()
