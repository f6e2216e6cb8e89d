"""Check a bundle on a GPU: parity with PyTorch, ragged batches, speed beside `transformers`, and flat memory.

`make check-cuda` runs it on a machine with an NVIDIA GPU, in about five minutes. Prints a table; exits with 1 if a
check fails. `run.py WORK_FOLDER --device cpu --quick` runs the same checks without a GPU, in less time.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

import ortgpt
from ortgpt.engine.engine import Engine
from ortgpt.generator import Generator
from ortgpt_exporter import export_bundle
from ortgpt_exporter.evaluation.verify import TOLERANCES, verify, verify_device_topk
from ortgpt_models import load_gpt

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# These need the paths above.
from timing import measure_in_turn, seconds

from support import write_standin


class Report:
    """The table, printed line by line, and the names of the checks that failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def note(self, name: str, value: str, passed: bool | None = None) -> None:
        """Print a line; a measurement that is not a check has `passed` None."""
        mark = "" if passed is None else "ok" if passed else "FAILED"
        print(f"{name:<56}{value:>34}  {mark}", flush=True)
        if passed is False:
            self.failed.append(name)

    def note_same(self, name: str, same: bool) -> None:
        self.note(name, "same" if same else "different", same)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(50257, size=length).tolist() for length in lengths]


def check_parity(report: Report, generator: ortgpt.Generator, checkpoint: Path) -> None:
    """Compare with PyTorch in float32, as an export does on the CPU, and each row of a batch with the row alone."""
    for check in verify(generator.engine, load_gpt(checkpoint)):
        same = f"{check.argmax_compared - check.argmax_differing}/{check.argmax_compared} same"
        report.note(f"logits: {check.name}", f"{check.max_abs_diff:.1e} of {check.tolerance:.1e}, {same}", check.passed)
    engine, prompts = generator.engine, random_prompts([1, 7, 17, 64, 129, 300])
    together = engine.prefill(engine.new_cache(6, 300), prompts)[:, 0]
    alone = np.stack([engine.prefill(engine.new_cache(1, 300), [ids])[0, 0] for ids in prompts])
    diff = float(np.abs(together - alone).max())
    bound = TOLERANCES[engine.session.cache.dtype] * float(np.abs(alone).max())
    report.note("ragged batch of 6 and its rows alone: largest difference", f"{diff:.1e} of {bound:.1e}", diff <= bound)
    options: dict[str, Any] = {"max_new_tokens": 32, "eos_token_id": []}
    rows = generator.generate_batch(prompts, **options)
    equal = [
        row.token_ids == generator.generate(ids, **options).token_ids for row, ids in zip(rows, prompts, strict=True)
    ]
    report.note("ragged batch of 6: rows with the ids of the row alone", f"{sum(equal)} of 6")


def check_device_topk(report: Report, generator: ortgpt.Generator) -> None:
    """Compare the ids chosen from the device's top k with those chosen from all logits; test equal logits and a NaN."""
    engine = generator.engine
    device_topk = engine.device_topk
    assert device_topk is not None
    vocab_size = engine.config.vocab_size
    verify_device_topk(device_topk, vocab_size)
    without_topk = Engine(engine.session, engine.config, masked_tokens=vocab_size - engine.allowed_vocab_size)
    from_all_logits = Generator(generator.bundle, without_topk, generator.tokenizer)
    settings: dict[str, dict[str, Any]] = {
        "greedy": {},
        "with a penalty": {"repetition_penalty": 1.3},
        "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    }
    for name, options in settings.items():
        ids, expected = (
            [row.token_ids for row in each.generate_batch(random_prompts([5, 17, 40]), max_new_tokens=24, **options)]
            for each in (generator, from_all_logits)
        )
        report.note_same(f"top k on the device, {name}: the ids of all logits", ids == expected)
    logits = np.zeros((2, 1, vocab_size), np.float32)
    logits[0, 0, [300, 100]] = 1.0
    logits[1, 0, 9] = np.nan
    none = np.zeros(0, np.int64)
    on_device = device_topk.session.copy_in(logits)
    _, top_ids, non_finite = device_topk.new_forward(2).run(on_device, [none, none], [1.0, 1.0])
    report.note_same("top k on the device: equal logits in order of ids", top_ids[0, :2].tolist() == [100, 300])
    report.note("top k on the device: the NaN is reported", str(non_finite[1]), bool(np.isnan(non_finite[1])))


def check_unused_slots(report: Report, generator: ortgpt.Generator) -> None:
    """Fill the cache with NaN before use: slots beyond a row's length must not change any logit."""
    engine, prompts = generator.engine, random_prompts([3, 70])
    clean = engine.prefill(engine.new_cache(2, 80), prompts).copy()
    cache, spec = engine.new_cache(2, 80), engine.session.cache
    for value in cache.values:
        value.update_inplace(np.full((2, engine.config.n_head, 128, spec.head_dim), np.nan, spec.dtype))
    report.note_same(
        "logits with NaN in unused slots of the cache", np.array_equal(clean, engine.prefill(cache, prompts))
    )


def measure_speed(report: Report, generator: ortgpt.Generator, checkpoint: Path, *, quick: bool) -> None:
    """Print milliseconds of a prefill and of a decode step, ours and those of `transformers` in the same dtype."""
    device = generator.engine.session.device.target
    dtype = torch.float16 if device == "cuda" else torch.float32
    model: Any = GPT2LMHeadModel.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    steps = 4 if quick else 64

    def ours(prompts: list[list[int]], new_tokens: int) -> object:
        return generator.generate_batch(prompts, max_new_tokens=new_tokens, eos_token_id=[])

    def theirs(prompts: list[list[int]], new_tokens: int) -> object:
        ids = torch.tensor(prompts, device=device)
        settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings).cpu()

    def prefill_and_step_ms(generate: Any, prompts: list[list[int]]) -> tuple[float, float]:
        first_s = seconds(partial(generate, prompts, 1))
        return 1e3 * first_s, 1e3 * (seconds(partial(generate, prompts, 1 + steps)) - first_s) / steps

    for batch_size, length in ((1, 128), (1, 900), (8, 128), (32, 128)):
        prompts = random_prompts([length] * batch_size)
        measurements = {generate: partial(prefill_and_step_ms, generate, prompts) for generate in (ours, theirs)}
        samples = measure_in_turn(measurements, rounds=1 if quick else 5)
        medians = {generate: np.median(times, axis=0) for generate, times in samples.items()}
        for name, our_ms, their_ms in zip(("prefill", "decode step"), medians[ours], medians[theirs], strict=True):
            value = f"{our_ms:.2f} ms, transformers {their_ms:.2f}, {their_ms / our_ms:.2f}x"
            report.note(f"{name}, batch {batch_size}, prompt {length}", value)


def check_memory(report: Report, generator: ortgpt.Generator, *, quick: bool) -> None:
    """Generate with many lengths and batch sizes; after a warm-up, device memory must not grow."""
    if generator.engine.session.device.target != "cuda":
        report.note("device memory", "not on a GPU")
        return
    random = np.random.default_rng(1)

    def used_after(calls: int) -> int:
        for _ in range(calls):
            prompts = random_prompts(random.integers(1, 600, size=int(random.integers(1, 9))).tolist())
            generator.generate_batch(prompts, max_new_tokens=int(random.integers(1, 9)))
        free, total = torch.cuda.mem_get_info()
        return (total - free) // 2**20

    generator.generate_batch(random_prompts([600] * 8), max_new_tokens=9)
    before, after = used_after(50), used_after(20 if quick else 300)
    report.note("device memory after some and many calls, MiB", f"{before:,} and {after:,}", after - before <= 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    report = Report()
    checkpoint, bundle = args.work / "standin", args.work / "standin-cuda"
    if not checkpoint.is_dir():
        write_standin(checkpoint)
    export_bundle(checkpoint, bundle, target="cuda", force=bundle.exists())
    with ortgpt.load(bundle, device=args.device) as generator:
        session = generator.engine.session
        if not session.device.is_cpu:
            torch.cuda.set_device(session.device.index)
        report.note("device", "CPU" if session.device.is_cpu else torch.cuda.get_device_name())
        report.note("onnxruntime", f"{session.onnxruntime.__version__}, {session.handle.get_providers()[0]}")
        check_parity(report, generator, checkpoint)
        check_device_topk(report, generator)
        check_unused_slots(report, generator)
        measure_speed(report, generator, checkpoint, quick=args.quick)
        check_memory(report, generator, quick=args.quick)
    sys.exit(f"failed: {', '.join(report.failed)}" if report.failed else 0)


if __name__ == "__main__":
    main()
