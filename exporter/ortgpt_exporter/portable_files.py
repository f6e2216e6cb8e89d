"""Make the files of a portable bundle for other runtimes: tokenizer.json and onnxruntime-genai's configuration.

Of the graph it knows only the names of the tensors. Writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ortgpt.contract import KEY_VALUE, File, Tensor, TokenizerKind
from ortgpt.text.bpe_files import parse_merges
from ortgpt_exporter.checkpoint.tokenizer_folder import TokenizerFiles
from ortgpt_models import GPTConfig


def portable_files(config: GPTConfig, tokenizer: TokenizerFiles, *, generates: bool = True) -> dict[str, str]:
    """Return the text of each further file of a portable bundle by the file's name.

    The tokenizer.json is the checkpoint's own if that has every token. A model that generates text also gets
    onnxruntime-genai's configuration.
    """
    if tokenizer.kind == TokenizerKind.NONE:
        return {File.GENAI_CONFIG: _text(genai_config(config))}
    files = {
        File.TOKENIZER: tokenizer_json(tokenizer),
        File.TOKENIZER_CONFIG: _text(_tokenizer_config(config, tokenizer)),
    }
    return files | ({File.GENAI_CONFIG: _text(genai_config(config))} if generates else {})


def tokenizer_json(files: TokenizerFiles) -> str:
    """Return the text of a tokenizer.json with every token: the checkpoint's own where that has them."""
    own = files.tokenizer_json
    if own is None or Tokenizer.from_str(own).get_vocab(with_added_tokens=True) != files.vocab:
        own = _tokenizer_json(files)
    return own


def genai_config(config: GPTConfig) -> dict[str, Any]:
    """Return the genai_config.json with which onnxruntime-genai opens a portable graph (tried with version 0.18)."""
    past = {f"past_{kind}_names": Tensor.past("%d", kind) for kind in KEY_VALUE}
    present = {f"present_{kind}_names": Tensor.present("%d", kind) for kind in KEY_VALUE}
    end = config.eos_token_id if config.eos_token_id is not None else config.bos_token_id
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": end, "pad_token_id": end}
    return {
        "model": {
            "type": "decoder",
            **{key: token_id for key, token_id in special.items() if token_id is not None},
            "context_length": config.n_positions,
            "vocab_size": config.vocab_size,
            "decoder": {
                "filename": File.MODEL,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "head_size": config.head_dim,
                "hidden_size": config.n_embd,
                "num_attention_heads": config.n_head,
                "num_key_value_heads": config.n_head,
                "num_hidden_layers": config.n_layer,
                "inputs": {
                    name: name for name in (Tensor.INPUT_IDS, Tensor.ATTENTION_MASK, Tensor.POSITION_IDS)
                } | past,
                "outputs": {Tensor.LOGITS: Tensor.LOGITS} | present,
            },
        },
        # The cache grows, so past and present are different buffers.
        "search": {"max_length": config.n_positions, "do_sample": False, "past_present_share_buffer": False},
    }  # fmt: skip


def _tokenizer_config(config: GPTConfig, tokenizer: TokenizerFiles) -> dict[str, Any]:
    """Return the tokenizer_config.json with which AutoTokenizer of `transformers` gives the same ids."""
    if tokenizer.kind == TokenizerKind.TOKENIZER_JSON:  # that class takes tokenizer.json as it is
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.n_positions}
        return named | dict(tokenizer.roles)
    token_of = {token_id: token for token, token_id in tokenizer.vocab.items()}
    bos, eos = (
        None if token_id is None else token_of[token_id] for token_id in (config.bos_token_id, config.eos_token_id)
    )
    special = {"bos_token": bos or eos, "eos_token": eos or bos, "unk_token": eos or bos}
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": config.n_positions,
        "add_prefix_space": False,
        **{key: token for key, token in special.items() if token is not None},
        **tokenizer.roles,
    }


def _tokenizer_json(files: TokenizerFiles) -> str:
    """Return the tokenizer.json of a GPT-2 vocabulary; tokens that no merge makes are added tokens."""
    merges = parse_merges(files.texts[File.MERGES], source=File.MERGES)
    merged = {left + right for left, right in merges}
    added = sorted(
        (token_id, token) for token, token_id in files.vocab.items() if len(token) > 1 and token not in merged
    )
    tokenizer = Tokenizer(models.BPE(dict(files.vocab), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for _, token in added])
    text = str(tokenizer.to_str())
    if files.post_processor is None:
        return text
    return json.dumps(json.loads(text) | {"post_processor": dict(files.post_processor)}, ensure_ascii=False)


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
