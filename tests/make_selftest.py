"""Write the bundle that `ortgpt doctor` tests itself with: `python tests/make_selftest.py`.

Among random models of one layer it takes one whose greedy continuation has no close second best token, so that every
right computation gives the same tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import ortgpt
from ortgpt.doctor import SELF_TEST, SELF_TEST_PROMPT
from ortgpt_exporter import export_bundle
from support import random_model

_TOKENS = 8
_MARGIN = 0.05  # of logits, between the best token and the next
_SHAPE = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1000):
            work = Path(folder) / str(seed)
            write_checkpoint(work / "checkpoint", seed)
            bundle = export_bundle(work / "checkpoint", work / "bundle").path
            with ortgpt.load(bundle) as generator:
                done = generator.generate(SELF_TEST_PROMPT, max_new_tokens=_TOKENS, logprobs=2)
            assert done.logprobs is not None
            margin = min(each.top[0][1] - each.top[1][1] for each in done.logprobs)
            if margin >= _MARGIN and len({*done.token_ids}) > _TOKENS // 2:
                shutil.rmtree(SELF_TEST, ignore_errors=True)
                shutil.copytree(bundle, SELF_TEST)
                sys.stdout.write(f"seed {seed}: SELF_TEST_IDS = {tuple(done.token_ids)}\n")
                return


def write_checkpoint(folder: Path, seed: int) -> None:
    """Write a random checkpoint whose tokens are the bytes, and end-of-text."""
    folder.mkdir(parents=True)
    random_model(seed, **_SHAPE, bos_token_id=256, eos_token_id=256).save_pretrained(folder)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [*map(chr, printable), *(chr(256 + place) for place in range(len(rest)))]
    vocab = dict(zip(letters, np.arange(256).tolist(), strict=True)) | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n")


if __name__ == "__main__":
    main()
