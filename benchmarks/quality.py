"""Compare the accuracy of quantised weights of ortgpt, llama.cpp and OpenVINO, beside their size.

`make bench-quality TEXT=file [CALIBRATION=file]` sets the other environments up and runs this: quality.py TEXT
CALIBRATION WORK_FOLDER LLAMA_PYTHON OPENVINO_PYTHON. All score the same ids with the bundled model, in rows as long as
its context that begin with end-of-text. Prints the ratio of each perplexity to that of the float32 network in ortgpt.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ortgpt
from ortgpt.sampling.logprobs import log_softmax
from ortgpt_exporter import Quantization, export_bundle, quantize_bundle
from ortgpt_exporter.checkpoint.load import find_folder
from ortgpt_exporter.evaluation.sample import split_rows
from ortgpt_exporter.texts import read_utf8

PEERS = Path(__file__).parent / "peers"
Rows = list[list[int]]


def score(bundle: Path, rows: Rows, prefill: str) -> float:
    """Return the summed negative log-likelihood, in nats, of every id but the first of each row."""
    nll = 0.0
    with ortgpt.load(bundle, prefill=prefill) as generator:
        for row in rows:
            cache = generator.engine.new_cache(1, len(row))
            positions = np.arange(len(row) - 1)
            logits = generator.engine.prefill(cache, [row[:-1]], positions[None])[0]
            nll -= float(log_softmax(logits.astype(np.float64))[positions, row[1:]].sum())
    return nll


def score_ours(work: Path, text: str, calibration: Path | None) -> tuple[Rows, dict[str, dict[str, float]]]:
    recipes = {
        "int8": Quantization(dtype="int8"),
        "int8, blocks of 64": Quantization(dtype="int8", block_size=64),
        "int8, w8a8": Quantization(dtype="int8", method="w8a8"),
        "int4": Quantization(dtype="int4"),
        "int4, head int8": Quantization(dtype="int4", head_dtype="int8"),
    }
    if calibration is not None:
        gptq: dict[str, Any] = {"dtype": "int4", "method": "gptq", "calibration": calibration}
        recipes |= {
            "int4, gptq": Quantization(**gptq),
            "int4, gptq, head int8": Quantization(**gptq, head_dtype="int8"),
        }
    source = export_bundle("austen", work / "float32", force=(work / "float32").exists()).path
    with ortgpt.load(source) as generator:
        ids = generator.tokenizer.encode(text)
        rows = split_rows(ids, generator.start_id, generator.engine.config.n_positions)
    bundles = {"float32": source}
    for name, quantization in recipes.items():
        out = work / name.replace(", ", "-").replace(" ", "-")
        bundles[name] = quantize_bundle(source, out, quantization, force=out.exists()).path
    ways = [(name, name, "auto") for name in bundles] + [("int4, --prefill exact", "int4", "exact")]
    return rows, {
        way: {"nll": score(bundles[name], rows, prefill), "bytes": size_of(bundles[name])}
        for way, name, prefill in ways
    }


def size_of(bundle: Path) -> int:
    return sum(path.stat().st_size for path in bundle.iterdir())


def score_peer(python: str, script: str, work: Path, rows: Rows) -> dict[str, dict[str, float]]:
    """Run a peer's script in its own environment. If it fails, exit with the last lines that it wrote."""
    work.mkdir(exist_ok=True)
    command = [python, str(PEERS / script), str(find_folder("austen")), str(work), str(os.cpu_count())]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
    result = subprocess.run(
        command, input=json.dumps(rows), capture_output=True, text=True, check=False, env=environment
    )
    if result.returncode:
        sys.exit(f"{script} failed: {' | '.join(result.stderr.splitlines()[-3:])}")
    scores: dict[str, dict[str, float]] = json.loads(result.stdout.splitlines()[-1])
    return scores


def main() -> None:
    text, calibration, work = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    llama, openvino = sys.argv[4:]
    work.mkdir(parents=True, exist_ok=True)
    rows, scores = score_ours(work, read_utf8(text), Path(calibration) if calibration else None)
    results = {"ortgpt": scores}
    results["llama.cpp"] = score_peer(llama, "llama_cpp_nll.py", work / "llama", rows)
    results["openvino"] = score_peer(openvino, "openvino_nll.py", work / "openvino", rows)
    tokens = sum(len(row) - 1 for row in rows)
    baseline = scores["float32"]["nll"]
    print(f"{text.name}, {tokens:,} tokens; perplexity of float32 {math.exp(baseline / tokens):.3f}")
    print(f"{'':<12}{'weights':<24}{'MB':>8}{'perplexity ratio':>18}")
    for program, weights in results.items():
        for name, result in weights.items():
            result["ratio"] = math.exp((result["nll"] - baseline) / tokens)
            print(f"{program:<12}{name:<24}{result['bytes'] / 1e6:>8.2f}{result['ratio']:>18.4f}")
    (work / "quality.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
