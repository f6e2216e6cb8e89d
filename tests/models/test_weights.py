from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2LMHeadModel

from ortgpt_models import ModelError, load_config, load_gpt, save_gpt
from support import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", seed=5)


def rewrite(folder: Path, change: object) -> dict[str, torch.Tensor]:
    """Apply `change` to the tensors of a checkpoint and store them again."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed: dict[str, torch.Tensor] = change(tensors)  # type: ignore[operator]
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, path, metadata={"format": "pt"})
    return changed


@torch.no_grad()
def assert_same_as_transformers(folder: Path) -> None:
    ids = torch.arange(40)[None] * 7 % 300
    theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert (load_gpt(folder)(ids) - theirs(ids).logits).abs().max() <= 1e-4


def test_folder_written_by_transformers(folder: Path) -> None:
    assert "transformer.wte.weight" in load_file(folder / "model.safetensors")
    assert_same_as_transformers(folder)


def test_names_without_prefix_and_with_old_mask_buffers(folder: Path) -> None:
    expected = load_gpt(folder).state_dict()

    def to_openai(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
        masked = {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
        return plain | masks | masked

    rewrite(folder, to_openai)
    found = load_gpt(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_widened(folder: Path, dtype: torch.dtype) -> None:
    stored = rewrite(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    wte = load_gpt(folder).wte.weight
    assert wte.dtype == torch.float32
    assert torch.equal(wte, stored["transformer.wte.weight"].float())


def test_every_fault_is_named_at_once(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["transformer.h.1.ln_2.weight"], tensors["transformer.ln_f.bias"]
        tensors["transformer.wpe.weight"] = torch.zeros(63, 48)
        tensors["transformer.h.0.attn.c_attn.bias"] = torch.zeros(144, dtype=torch.int8)
        return tensors | {"score.weight": torch.zeros(2, 48), "transformer.h.2.ln_1.bias": torch.zeros(48)}

    rewrite(folder, damage)
    with pytest.raises(ModelError) as caught:
        load_gpt(folder)
    message = str(caught.value)
    for part in (
        "missing h.1.ln_2.weight (48,)",
        "missing ln_f.bias (48,)",
        "transformer.wpe.weight has shape (63, 48), expected (64, 48)",
        "transformer.h.0.attn.c_attn.bias has dtype I8",
        "unexpected score.weight",
        "unexpected transformer.h.2.ln_1.bias",
    ):
        assert part in message


def test_a_head_equal_to_the_embedding_is_taken_and_another_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()})
    load_gpt(folder)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from the token embedding"):
        load_gpt(folder)


def test_a_tensor_with_and_without_prefix_is_a_fault(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"ln_f.bias": torch.ones(48)})
    with pytest.raises(ModelError, match=r"ln_f\.bias is there with and without 'transformer\.'"):
        load_gpt(folder)


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in"):
        load_config(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_gpt(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_gpt(folder)
    for text, reason in (("{", "not valid JSON"), ("[1]", "JSON list"), ("[" * 100_000, "not valid JSON")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=reason):
            load_config(folder)


@torch.no_grad()
def test_what_is_written_loads_in_transformers(folder: Path, tmp_path: Path) -> None:
    gpt = load_gpt(folder)
    out = tmp_path / "again"
    out.mkdir()
    save_gpt(gpt, out, dtype=torch.float16)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    half = load_gpt(out)
    assert torch.equal(half.wte.weight, gpt.wte.weight.half().float())
    assert_same_as_transformers(out)


def test_small_tokenizer_is_a_transformers_tokenizer(folder: Path) -> None:
    assert AutoTokenizer.from_pretrained(folder)("a truth").input_ids
