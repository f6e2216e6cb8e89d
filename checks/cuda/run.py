"""Everything about a GPU in one table: parity, ragged batches, speed against transformers on it, flat memory.

`make test-cuda` runs it on a machine with an NVIDIA GPU, in about five minutes; exits with 1 when a check fails.
`run.py WORK_FOLDER --device cpu --quick` goes the same way without one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

import ortgpt
from ortgpt.engine.engine import Engine
from ortgpt.generator import Generator
from ortgpt.model import LoadedModel
from ortgpt_exporter import export_bundle
from ortgpt_exporter.evaluation.verify import TOLERANCES, verify, verify_selector
from ortgpt_models import load_gpt

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import write_standin  # needs the path above

FAILED: list[str] = []


def report(what: str, shown: str, good: bool | None = None) -> None:
    """Print a line of the table; `good` None is a measurement, not a check."""
    mark = "" if good is None else "ok" if good else "FAILED"
    print(f"{what:<52}{shown:>34}  {mark}", flush=True)  # noqa: T201  # its table
    if good is False:
        FAILED.append(what)


def report_same(what: str, same: bool) -> None:
    report(what, "same" if same else "different", same)


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(50257, size=length).tolist() for length in lengths]


def check_parity(generator: ortgpt.Generator, checkpoint: Path) -> None:
    """Compare with PyTorch in float32, as an export does on the CPU, and each row of a batch with its solo run."""
    for check in verify(generator.engine, load_gpt(checkpoint)):
        same = f"{check.argmax_compared - check.argmax_differing}/{check.argmax_compared} same"
        report(f"logits: {check.name}", f"{check.max_abs_diff:.1e} of {check.tolerance:.1e}, {same}", check.passed)
    engine, prompts = generator.engine, random_prompts([1, 7, 17, 64, 129, 300])
    together = engine.prefill(engine.new_cache(6, 300), prompts)[:, 0]
    alone = np.stack([engine.prefill(engine.new_cache(1, 300), [ids])[0, 0] for ids in prompts])
    worst = float(np.abs(together - alone).max())
    bound = TOLERANCES[generator.engine.session.cache.dtype] * float(np.abs(alone).max())
    report("ragged batch of 6 against solo: largest difference", f"{worst:.1e} of {bound:.1e}", worst <= bound)
    options: dict[str, Any] = {"max_new_tokens": 32, "eos_token_id": []}
    rows = generator.generate_batch(prompts, **options)
    equal = [
        row.token_ids == generator.generate(ids, **options).token_ids for row, ids in zip(rows, prompts, strict=True)
    ]
    report("ragged batch of 6: rows with the ids of their solo run", f"{sum(equal)} of 6")


def check_selector(generator: ortgpt.Generator) -> None:
    """Compare what the device picks with picks from all logits; a NaN and equal logits must be told apart."""
    engine = generator.engine
    selector = engine.device_topk
    assert selector is not None
    vocab_size = engine.config.vocab_size
    verify_selector(selector, vocab_size)
    whole = Engine(engine.session, engine.config, masked_tokens=vocab_size - engine.allowed_vocab_size)
    plain = Generator(LoadedModel(generator.bundle, whole, generator.tokenizer))
    settings: dict[str, dict[str, Any]] = {
        "greedy": {},
        "with a penalty": {"repetition_penalty": 1.3},
        "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    }
    for name, options in settings.items():
        found, want = (
            [row.token_ids for row in some.generate_batch(random_prompts([5, 17, 40]), max_new_tokens=24, **options)]
            for some in (generator, plain)
        )
        report_same(f"picked on the device, {name}: the ids of all logits", found == want)
    logits = np.zeros((2, 1, vocab_size), np.float32)
    logits[0, 0, [300, 100]] = 1.0
    logits[1, 0, 9] = np.nan
    none = np.zeros(0, np.int64)
    _, ids, bad = selector.new_forward(2).run(selector.session.copy_in(logits), [none, none], [1.0, 1.0])
    report_same("equal logits in order, and the NaN seen", ids[0, :2].tolist() == [100, 300] and bool(np.isnan(bad[1])))


def check_poison(generator: ortgpt.Generator) -> None:
    """Fill the cache with NaN before use: slots beyond a row's length must count for nothing."""
    engine, prompts = generator.engine, random_prompts([3, 70])
    clean = engine.prefill(engine.new_cache(2, 80), prompts).copy()
    cache, spec = engine.new_cache(2, 80), engine.session.cache
    for value in cache.values:
        value.update_inplace(np.full((2, engine.config.n_head, 128, spec.head_dim), np.nan, spec.dtype))
    report_same("logits with NaN in unused slots of the cache", np.array_equal(clean, engine.prefill(cache, prompts)))


def timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure_speed(generator: ortgpt.Generator, checkpoint: Path, *, quick: bool) -> None:
    """Print milliseconds of prefill and of a decode step, ours and transformers' in the same type, interleaved."""
    device = generator.engine.session.device.target
    dtype = torch.float16 if device == "cuda" else torch.float32
    model: Any = GPT2LMHeadModel.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    steps = 4 if quick else 64

    def theirs(prompts: list[list[int]], new: int) -> float:
        ids = torch.tensor(prompts, device=device)
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return timed(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **settings).cpu())

    def ours(prompts: list[list[int]], new: int) -> float:
        return timed(lambda: generator.generate_batch(prompts, max_new_tokens=new, eos_token_id=[]))

    for batch, length in ((1, 128), (1, 900), (8, 128), (32, 128)):
        prompts = random_prompts([length] * batch)
        times: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
        for _ in range(2 if quick else 6):
            for name, run in (("ours", ours), ("theirs", theirs)):
                first = run(prompts, 1)
                times[name].append((first, (run(prompts, 1 + steps) - first) / steps))
        medians = {
            name: [1000 * statistics.median(row[place] for row in rows[1:]) for place in (0, 1)]
            for name, rows in times.items()
        }
        for place, what in enumerate(("prefill", "decode step")):
            mine, other = medians["ours"][place], medians["theirs"][place]
            shown = f"{mine:.2f} ms, transformers {other:.2f}, {other / mine:.2f}x"
            report(f"{what}, batch {batch}, prompt {length}", shown)


def check_memory(generator: ortgpt.Generator, *, quick: bool) -> None:
    """Generate with ever new lengths and batch sizes; after a warm-up no more memory may be taken from the device."""
    if generator.engine.session.device.target != "cuda":
        report("device memory", "not on a GPU")
        return
    random = np.random.default_rng(1)

    def some(calls: int) -> int:
        for _ in range(calls):
            prompts = random_prompts(random.integers(1, 600, size=int(random.integers(1, 9))).tolist())
            generator.generate_batch(prompts, max_new_tokens=int(random.integers(1, 9)))
        free, total = torch.cuda.mem_get_info()
        return (total - free) // 2**20

    generator.generate_batch(random_prompts([600] * 8), max_new_tokens=9)
    before, after = some(50), some(20 if quick else 300)
    report("device memory after some and many calls, MiB", f"{before:,} and {after:,}", after - before <= 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    checkpoint, bundle = given.work / "standin", given.work / "standin-cuda"
    if not checkpoint.is_dir():
        write_standin(checkpoint)
    export_bundle(checkpoint, bundle, target="cuda", force=bundle.exists())
    with ortgpt.load(bundle, device=given.device) as generator:
        session = generator.engine.session
        if not session.device.is_cpu:
            torch.cuda.set_device(session.device.index)
        report("device", "CPU" if session.device.is_cpu else torch.cuda.get_device_name())
        report("onnxruntime", f"{session.onnxruntime.__version__}, {session.handle.get_providers()[0]}")
        check_parity(generator, checkpoint)
        check_selector(generator)
        check_poison(generator)
        measure_speed(generator, checkpoint, quick=given.quick)
        check_memory(generator, quick=given.quick)
    sys.exit(f"failed: {', '.join(FAILED)}" if FAILED else 0)


if __name__ == "__main__":
    main()
