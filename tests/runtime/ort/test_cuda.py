"""The core of the generation API on a GPU, against the CPU on the same bundle; skipped where there is none.

`make check-cuda` runs it, and measures besides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import ortgpt
from ortgpt_exporter import export_bundle

pytestmark = pytest.mark.cuda
PROMPTS = ["It is a truth", "", "a single man", "universally acknowledged, that", "Café — 日本"]


def why_no_gpu() -> str | None:
    """Ask the driver, and not what is tested: what is there and does not work has to fail."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this onnxruntime has no CUDAExecutionProvider"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed"
    count = ctypes.c_int()
    works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return None if works and count.value else "the NVIDIA driver finds no GPU"


@pytest.fixture(scope="module")
def pair(small_checkpoint: Path) -> Iterator[tuple[ortgpt.Generator, ortgpt.Generator]]:
    """The same float16 bundle on the GPU and on the CPU."""
    reason = why_no_gpu()
    if reason is not None:
        pytest.skip(reason)
    bundle = export_bundle(small_checkpoint, small_checkpoint.parent / "cuda-bundle", target="cuda").path
    with ortgpt.load(bundle, device="cuda") as gpu, ortgpt.load(bundle, device="cpu") as cpu:
        assert gpu.device == "cuda:0"
        yield gpu, cpu


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2},
        {"logprobs": 2}, {"grammar": "[a-z ]{5,20}"}, {"prompt_lookup_num_tokens": 4}, {"num_beams": 3},
        {"context_overflow": "slide", "max_new_tokens": 90}, {"num_return_sequences": 3, "seed": 1},
    ],
)  # fmt: skip
def test_the_gpu_writes_what_the_cpu_writes(
    pair: tuple[ortgpt.Generator, ortgpt.Generator], options: dict[str, Any]
) -> None:
    """But where float16 rounds two near tokens otherwise: nine tokens of ten have to agree up to the first."""
    gpu, cpu = pair
    settings: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [], **options}
    agreed = compared = 0
    for one, two in zip(gpu.generate_batch(PROMPTS, **settings), cpu.generate_batch(PROMPTS, **settings), strict=True):
        first = next((i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b), None)
        length = len(one.token_ids) if first is None else first
        agreed, compared = agreed + length, compared + max(length, len(two.token_ids))
    assert agreed >= 0.9 * compared


def test_conversations_and_choices_on_the_gpu(pair: tuple[ortgpt.Generator, ortgpt.Generator]) -> None:
    gpu, cpu = pair
    talk = gpu.conversation("It is")
    talk.generate(" a", max_new_tokens=5)
    branch = talk.branch()
    assert branch.generate(max_new_tokens=5).token_ids == talk.generate(max_new_tokens=5).token_ids
    texts = [" that", " a truth", " universally"]
    found, want = gpu.choose("It is", texts), cpu.choose("It is", texts)
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in want], abs=0.1)
    with pytest.raises(ortgpt.DeviceError, match="prefix_cache works on the CPU"):
        gpu.prefix_cache(size_bytes=2**20)
