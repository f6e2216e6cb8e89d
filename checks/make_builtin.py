"""Write the bundles that are part of the runtime: `python checks/make_builtin.py`.

`austen` is the bundled checkpoint in int4. `selftest`, which `ortgpt doctor` runs, is a random model of one layer whose
vocabulary is the bytes. Its seed gives a greedy continuation without a close second best token, so every right
computation gives the same tokens as `transformers`.
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

from ortgpt.bundle.folder import BUILT_IN
from ortgpt.tools.doctor import SELF_TEST, SELF_TEST_PROMPT
from ortgpt_exporter import export_bundle

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import greedy_ids, random_model  # needs the path above

SEED = 1
TOKENS = 8
MIN_MARGIN = 0.05  # between the logits of the best token and the next
LETTERS = sorted(ByteLevel.alphabet())


def main() -> None:
    prompt = [LETTERS.index(letter) for letter in SELF_TEST_PROMPT]
    model = self_test_model()
    ids = greedy_ids(model, prompt, TOKENS)
    with torch.no_grad():
        best = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].topk(2).values
    if float((best[:, 0] - best[:, 1]).min()) < MIN_MARGIN or len({*ids}) <= TOKENS // 2:
        raise SystemExit(f"SEED = {SEED} gives {ids}, with a close second or too few different; choose another")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "checkpoint")
        shutil.rmtree(SELF_TEST, ignore_errors=True)
        export_bundle(Path(folder) / "checkpoint", SELF_TEST)
    export_bundle("austen", BUILT_IN / "austen", dtype="int4", force=(BUILT_IN / "austen").exists())
    print(f"SELF_TEST_IDS = {tuple(ids)}")


def self_test_model() -> GPT2LMHeadModel:
    shape: dict[str, Any] = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return random_model(SEED, **shape, bos_token_id=256, eos_token_id=256)


def write_checkpoint(folder: Path) -> None:
    """Write the model with its tokenizer: the bytes in the order of their letters, and end-of-text."""
    folder.mkdir(parents=True)
    self_test_model().save_pretrained(folder)
    vocab = {letter: place for place, letter in enumerate(LETTERS)} | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")


if __name__ == "__main__":
    main()
