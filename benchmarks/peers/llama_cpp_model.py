"""Write a GPT-2 checkpoint as GGUF, and quantise it with llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from safetensors.numpy import load_file

FORMATS = {"f32": None, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the name of a tensor in llama.cpp, for h.3.attn.c_attn.bias: blk.3.attn_qkv.bias."""
    name = name.removeprefix("transformer.")
    module, _, kind = name.rpartition(".")
    if not module.startswith("h."):
        return f"{NAMES[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def stored(name: str, tensor: Any) -> Any:
    """Return a tensor as GGUF stores it: a layer's matrix, (in, out) in the checkpoint, becomes (out, in)."""
    return tensor.T if ".c_" in name and tensor.ndim == 2 else tensor


def write_gguf(checkpoint: Path, path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_name("gpt2")
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    vocab = json.loads((checkpoint / "vocab.json").read_text(encoding="utf-8"))
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    lines = (checkpoint / "merges.txt").read_text(encoding="utf-8").splitlines()
    writer.add_token_merges([line for line in lines if line and not line.startswith("#version")])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored(name, tensor), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(checkpoint: Path, work: Path) -> dict[str, Path]:
    """Write a checkpoint in each format, and return the files."""
    source = work / "f32.gguf"
    write_gguf(checkpoint, source)
    paths = {name: work / f"{name}.gguf" for name in FORMATS}
    for name, kind in FORMATS.items():
        if kind is not None:
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = kind
            failed = llama_cpp.llama_model_quantize(str(source).encode(), str(paths[name]).encode(), params)
            assert not failed, f"llama.cpp cannot quantise to {name}"
    return paths
