"""OpenVINO GenAI for `benchmarks/compare.py`. By default it computes a float32 file in bfloat16."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import Clock, Ids, main

WEIGHTS: dict[str, dict[str, Any]] = {"float32": {"load_in_8bit": False}, "int8": {"load_in_8bit": True}, "int4": {}}


def convert(checkpoint: Path, work: Path) -> dict[str, Path]:
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    paths = {name: work / name for name in WEIGHTS}
    for name, path in paths.items():
        weights = WEIGHTS[name] or {"quantization_config": OVWeightQuantizationConfig(bits=4)}
        OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, **weights).save_pretrained(path)
        openvino.save_model(tokenizer, path / "openvino_tokenizer.xml")
        openvino.save_model(detokenizer, path / "openvino_detokenizer.xml")
    return paths | {"bfloat16": paths["float32"]}


class Model:
    def __init__(self, path: Path, format_name: str, threads: int) -> None:
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        if format_name == "float32":
            settings["INFERENCE_PRECISION_HINT"] = "f32"
        self.pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **settings)

    def _config(self, new_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        return config

    def generate(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float, float]:
        if len(prompts) > 1:
            # It streams one row only, so the first token is timed in a run of its own; with other ids, since it keeps
            # what it computed for a prompt.
            first_s = self._run([row[::-1] for row in prompts], 1)[1]
            ids, whole_s = self._run(prompts, new_tokens)
            return ids, first_s, whole_s - first_s
        clock = Clock()
        inputs = openvino.Tensor(_array(prompts))
        result = self.pipeline.generate(inputs, self._config(new_tokens), Streamer(clock))
        return [list(row) for row in result.tokens], *clock.split()

    def _run(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float]:
        ids = _array(prompts)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(ids * 0 + 1))
        started = time.perf_counter()
        result = self.pipeline.generate(inputs, self._config(new_tokens))
        return [list(row) for row in result.tokens], time.perf_counter() - started

    def first_token(self, text: str) -> str:
        return str(self.pipeline.generate(text, self._config(1)))


class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # it has no type information
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def write(self, token: Any) -> Any:
        self.clock.tick()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def _array(prompts: Ids) -> Any:
    return np.array(prompts, np.int64)


if __name__ == "__main__":
    main(convert, Model)
