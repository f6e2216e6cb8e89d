"""CTranslate2 for `benchmarks/compare.py`. It has no tokenizer, so its first token follows fixed ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ctranslate2
from worker import Clock, Ids, main


def convert(checkpoint: Path, work: Path) -> dict[str, Path]:
    from ctranslate2.converters import TransformersConverter

    paths = {name: work / name for name in ("float32", "int8")}
    for name, path in paths.items():
        if path.exists():
            shutil.rmtree(path)
        TransformersConverter(str(checkpoint)).convert(str(path), quantization=name)
    return paths


class Model:
    def __init__(self, path: Path, format_name: str, threads: int) -> None:
        self.generator = ctranslate2.Generator(
            str(path), device="cpu", inter_threads=1, intra_threads=threads, compute_type=format_name
        )
        self.tokens: list[str] = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float, float]:
        starts = [[self.tokens[token_id] for token_id in ids] for ids in prompts]
        clock = Clock()
        results = self.generator.generate_batch(
            starts, max_length=new_tokens, min_length=new_tokens, sampling_topk=1, beam_size=1, end_token=[],
            include_prompt_in_result=False, callback=lambda step: clock.tick(),
        )  # fmt: skip
        first_s, rest_s = clock.split()
        return [result.sequences_ids[0] for result in results], first_s, rest_s

    def first_token(self, text: str) -> str:
        ids, _, _ = self.generate([list(range(1, 1 + len(text.split())))], 1)
        return str(ids[0][0])


if __name__ == "__main__":
    main(convert, Model)
