"""Write the bundle that `ortgpt doctor` tests itself with: `python tests/make_selftest.py`.

It is made of a random model of one layer with a vocabulary of bytes, of a seed for which the greedy continuation has no
close second best token, so that every right computation gives the same tokens: those that `transformers` gives.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GPT2LMHeadModel

from ortgpt.tools.doctor import SELF_TEST, SELF_TEST_PROMPT
from ortgpt_exporter import export_bundle
from support import greedy_ids, random_model

SEED = 1
_TOKENS = 8
_MARGIN = 0.05  # of logits, between the best token and the next
_LETTERS = sorted(ByteLevel.alphabet())


def main() -> None:
    prompt = [_LETTERS.index(letter) for letter in SELF_TEST_PROMPT]
    model = self_test_model()
    ids = greedy_ids(model, prompt, _TOKENS)
    with torch.no_grad():
        best = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].topk(2).values
    if float((best[:, 0] - best[:, 1]).min()) < _MARGIN or len({*ids}) <= _TOKENS // 2:
        raise SystemExit(f"SEED = {SEED} gives {ids}, with a close second or too much alike; take another one")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "checkpoint")
        shutil.rmtree(SELF_TEST, ignore_errors=True)
        export_bundle(Path(folder) / "checkpoint", SELF_TEST)
    sys.stdout.write(f"SELF_TEST_IDS = {tuple(ids)}\n")


def self_test_model() -> GPT2LMHeadModel:
    shape: dict[str, Any] = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return random_model(SEED, **shape, bos_token_id=256, eos_token_id=256)


def write_checkpoint(folder: Path) -> None:
    """Write the model, whose tokens are the bytes in the order of their letters, and end-of-text."""
    folder.mkdir(parents=True)
    self_test_model().save_pretrained(folder)
    vocab = {letter: place for place, letter in enumerate(_LETTERS)} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")


if __name__ == "__main__":
    main()
