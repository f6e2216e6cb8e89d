"""ortgpt for `benchmarks/compare.py`."""

from __future__ import annotations

from pathlib import Path

from worker import Clock, Ids, main

import ortgpt

QUANTIZED = ("int8", "int4")


def convert(checkpoint: Path, work: Path) -> dict[str, Path]:
    from ortgpt_exporter import Quantization, export_bundle, quantize_bundle

    float32 = export_bundle(checkpoint, work / "float32").path
    paths = {"float32": float32}
    for name in QUANTIZED:
        paths[name] = quantize_bundle(float32, work / name, Quantization(dtype=name)).path
    return paths


class Model:
    def __init__(self, path: Path, format_name: str, threads: int) -> None:
        self.generator = ortgpt.load(path, device="cpu", threads=threads)

    def generate(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float, float]:
        clock = Clock()
        completions = self.generator.generate_batch(prompts, max_new_tokens=new_tokens, eos_token_id=[])
        first_s = completions[0].timings.prefill_s
        return [completion.token_ids for completion in completions], first_s, clock.elapsed() - first_s

    def first_token(self, text: str) -> str:
        return self.generator.generate(text, max_new_tokens=1).text


if __name__ == "__main__":
    main(convert, Model)
