"""Decode with ortgpt and with `transformers`, interleaved in one run on the same weights, and state the ratio.

A random GPT-2 small (124M parameters; speed does not depend on their values) after a prompt of random ids, greedy,
batch 1. Prints a table. Run it on a machine that does nothing else: `make bench`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ortgpt
from ortgpt.cpus import allowed_cpus
from ortgpt_exporter import export_bundle
from ortgpt_exporter.checkpoint import find_folder

Run = Callable[[int], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    threads = allowed_cpus()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "checkpoint")
        bundle = export_bundle(Path(folder) / "checkpoint", Path(folder) / "bundle")
        prompt = np.random.default_rng(0).integers(50257, size=args.prompt_tokens).tolist()
        with ortgpt.load(bundle.path, threads=threads) as generator:
            ours: Run = functools.partial(run_ours, generator, prompt)
            theirs: Run = functools.partial(run_theirs, model, prompt)
            if ours(args.new_tokens) != theirs(args.new_tokens):
                raise SystemExit("the two do not generate the same tokens")
            rows = [
                [milliseconds(run, 1), milliseconds(run, args.new_tokens)]
                for _ in range(args.repeats)
                for run in (ours, theirs)
            ]
    steps = args.new_tokens - 1
    table = {}
    for name, runs in (("ortgpt", rows[0::2]), ("transformers", rows[1::2])):
        prefill = statistics.median(run[0] for run in runs)
        decode = statistics.median((run[1] - run[0]) / steps for run in runs)
        table[name] = (prefill, decode)
    versions = {name: importlib.metadata.version(name) for name in ("onnxruntime", "torch", "transformers")}
    print(f"{platform.machine()}, {threads} threads, Python {platform.python_version()}, {versions}")
    print(f"GPT-2 small, float32, batch 1, prompt {args.prompt_tokens}, {args.new_tokens} new tokens, the same ids")
    print(f"{'':<14}{'prefill, ms':>12}{'decode, ms/token':>18}")
    for name, (prefill, decode) in table.items():
        print(f"{name:<14}{prefill:>12.0f}{decode:>18.1f}")
    ratios = [theirs / ours for ours, theirs in zip(*table.values(), strict=True)]
    print(f"{'ratio':<14}{ratios[0]:>11.2f}×{ratios[1]:>17.2f}×")


def make_checkpoint(folder: Path) -> GPT2LMHeadModel:
    """Write a random GPT-2 small; the bundled vocabulary is filled up with added tokens, since only ids are timed."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    model.save_pretrained(folder)
    vocab = json.loads((find_folder("austen") / "vocab.json").read_text(encoding="utf-8"))
    vocab |= {f"<|added {token_id}|>": token_id for token_id in range(len(vocab), model.config.vocab_size)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_bytes((find_folder("austen") / "merges.txt").read_bytes())
    return model


def run_ours(generator: ortgpt.Generator, prompt: list[int], new_tokens: int) -> list[int]:
    return generator.generate(prompt, max_new_tokens=new_tokens, eos_token_id=[]).token_ids


@torch.no_grad()
def run_theirs(model: GPT2LMHeadModel, prompt: list[int], new_tokens: int) -> list[int]:
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def milliseconds(run: Run, new_tokens: int) -> float:
    started = time.perf_counter()
    run(new_tokens)
    return 1e3 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()
