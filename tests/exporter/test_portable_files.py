"""The files of a portable bundle for other runtimes. `make check-portable` opens them with those runtimes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ortgpt_exporter.checkpoint.tokenizer_files import read_tokenizer
from ortgpt_exporter.portable_files import genai_config, portable_files
from ortgpt_models import GPTConfig
from support import write_real_tokenizer, write_small_tokenizer

TEXTS = ["It is a truth", " Café 日本語 👩‍👩‍👧\n\n  x\t", "a<|endoftext|>b", "", "don't  we'll"]


@pytest.mark.parametrize("small", [True, False])
def test_the_written_tokenizer_splits_as_the_checkpoints_own(small: bool, tmp_path: Path) -> None:
    if small:
        write_small_tokenizer(tmp_path)
    else:
        write_real_tokenizer(tmp_path, added=("<|pad|>",))
    own = AutoTokenizer.from_pretrained(tmp_path, tokenizer_type="gpt2")
    end = 0 if small else 50256
    config = GPTConfig(vocab_size=len(own), bos_token_id=end, eos_token_id=end)
    out = tmp_path / "out"
    out.mkdir()
    for name, text in portable_files(config, read_tokenizer(tmp_path)).items():
        (out / name).write_text(text, encoding="utf-8")
    found = AutoTokenizer.from_pretrained(out)
    assert isinstance(found, PreTrainedTokenizerFast)
    assert found.get_vocab() == own.get_vocab()
    assert (found.bos_token, found.eos_token) == ("<|endoftext|>", "<|endoftext|>")
    for text in TEXTS:
        assert found(text).input_ids == own(text).input_ids
        assert found.decode(found(text).input_ids) == text


def test_a_checkpoints_own_tokenizer_json_is_copied_if_it_has_every_token(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path, tokenizer_type="gpt2").save_pretrained(tmp_path)
    config = GPTConfig(vocab_size=301, bos_token_id=None, eos_token_id=None)
    own = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    found = portable_files(config, read_tokenizer(tmp_path))
    assert found["tokenizer.json"] == own
    assert json.loads(found["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"  # as the folder declares it
    (tmp_path / "added_tokens.json").write_text('{"<|more|>": 300}')
    added = json.loads(portable_files(config, read_tokenizer(tmp_path))["tokenizer.json"])["added_tokens"]
    assert (added[-1]["content"], added[-1]["id"]) == ("<|more|>", 300)


def test_the_special_tokens_of_the_checkpoints_tokenizer_keep_their_names(tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    declared = {"bos_token": "<|startoftext|>", "pad_token": {"content": "<|pad|>"}, "sep_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(declared), encoding="utf-8")
    own = AutoTokenizer.from_pretrained(tmp_path, tokenizer_type="gpt2")
    config = GPTConfig(vocab_size=len(own), bos_token_id=0, eos_token_id=0)
    out = tmp_path / "out"
    out.mkdir()
    for name, text in portable_files(config, read_tokenizer(tmp_path)).items():
        (out / name).write_text(text, encoding="utf-8")
    found = AutoTokenizer.from_pretrained(out)
    for name in ("bos_token", "eos_token", "pad_token", "sep_token"):
        assert (name, getattr(found, name), found.convert_tokens_to_ids(getattr(found, name))) == (
            name, getattr(own, name), own.convert_tokens_to_ids(getattr(own, name)),
        )  # fmt: skip


def test_genai_config_describes_the_network() -> None:
    found = genai_config(GPTConfig(n_embd=48, n_head=3, n_layer=5, n_positions=77, vocab_size=99, eos_token_id=7))
    model, decoder = found["model"], found["model"]["decoder"]
    assert (model["type"], model["context_length"], model["vocab_size"], model["eos_token_id"]) == (
        "decoder",
        77,
        99,
        7,
    )
    assert (decoder["head_size"], decoder["hidden_size"], decoder["num_hidden_layers"]) == (16, 48, 5)
    assert decoder["num_attention_heads"] == decoder["num_key_value_heads"] == 3
    assert decoder["inputs"]["past_value_names"] == "past_key_values.%d.value"
    assert decoder["outputs"]["present_key_names"] == "present.%d.key"
    assert found["search"]["past_present_share_buffer"] is False
    without = genai_config(GPTConfig(bos_token_id=None, eos_token_id=None))["model"]
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & without.keys()
