"""Convert a GPT-2 checkpoint with optimum-intel, compress its weights with NNCF, and score rows of token ids.

openvino_nll.py CHECKPOINT WORK_FOLDER THREADS, rows as JSON on standard input, results as JSON on standard output.
Activations are computed in float32, so that only the loss of the weights is measured. For 8 and 4 bits, the row "as by
default" has OpenVINO's own choice of precision, with which its speed is measured.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"load_in_8bit": False},
    "int8": {"load_in_8bit": True},
    "int4": {"quantization_config": OVWeightQuantizationConfig(bits=4)},
    "int4, sym, group 64": {"quantization_config": OVWeightQuantizationConfig(bits=4, sym=True, group_size=64)},
}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@torch.no_grad()
def score(model: Any, rows: list[list[int]]) -> float:
    """Return the summed negative log-likelihood, in nats, of every id but the first of each row."""
    nll = 0.0
    for row in rows:
        ids = torch.tensor([row[:-1]])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double()
        nll += float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
    return nll


def main() -> None:
    checkpoint, work, threads = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    rows = json.load(sys.stdin)
    results = {}
    settings = {"INFERENCE_NUM_THREADS": threads}
    with contextlib.redirect_stdout(sys.stderr):
        for name, weights in WEIGHTS.items():
            folder = work / name
            OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, **weights).save_pretrained(
                folder
            )
            precisions = {name: {"INFERENCE_PRECISION_HINT": "f32"}}
            if name in ("int8", "int4"):
                precisions[f"{name}, as by default"] = {}
            for row, precision in precisions.items():
                model = OVModelForCausalLM.from_pretrained(folder, ov_config=settings | precision)
                results[row] = {"nll": score(model, rows), "bytes": size_of(folder)}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
