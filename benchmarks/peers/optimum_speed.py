"""Optimum's ONNX models for `benchmarks/compare.py`: float32 and dynamic int8."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnxruntime
from optimum.onnxruntime import ORTModelForCausalLM, ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
from transformers_speed import Model as Transformers
from worker import main


def convert(checkpoint: Path, work: Path) -> dict[str, Path]:
    paths = {"float32": work / "float32", "int8": work / "int8"}
    ORTModelForCausalLM.from_pretrained(checkpoint, export=True).save_pretrained(paths["float32"])
    config = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
    ORTQuantizer.from_pretrained(paths["float32"]).quantize(config, save_dir=paths["int8"])
    (paths["int8"] / "model_quantized.onnx").rename(paths["int8"] / "model.onnx")
    for path in paths.values():
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(checkpoint / name, path / name)
    return paths


class Model(Transformers):
    def open(self, path: Path, format_name: str, threads: int) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        return ORTModelForCausalLM.from_pretrained(path, session_options=options)


if __name__ == "__main__":
    main(convert, Model)
