"""Check products of integers with known results, and the logits of bundles, on this CPU: products.py WORK_FOLDER.

Reads the graphs and logits that run.py wrote there. Exits with 1 if one is wrong, and also if this CPU has no kernels
that saturate, since then the check would show nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import ortgpt
from ortgpt.bundle.folder import open_bundle
from ortgpt.ort.integer_probe import multiplies_exactly

CPU = ["CPUExecutionProvider"]


def product(path: Path, feeds: dict[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(path, options, providers=CPU).run(None, feeds)[0]


def main() -> None:
    work = Path(sys.argv[1])
    faults = 0

    def report(name: str, value: object, passed: bool) -> None:
        nonlocal faults
        faults += not passed
        print(f"{name:<56}{value!s:>14}  {'as expected' if passed else 'WRONG'}", flush=True)

    exact = multiplies_exactly(onnxruntime)
    report("u8 x s8 is exact without the option", exact, not exact)
    for expected in json.loads((work / "products.json").read_text()):
        x = np.full((expected["rows"], expected["width"]), expected["x"], expected["dtype"])
        y = product(work / expected["graph"], {"x": x})
        passed = bool(np.abs(y.astype(np.float64) - expected["y"]).max() <= expected["tolerance"] * expected["y"])
        report(f"{expected['graph']}, {expected['rows']} rows: {expected['y']:,.0f}", f"{y.flat[0]:,.0f}", passed)
    ids = json.loads((work / "ids.json").read_text())
    for logits_path in sorted(work.glob("*.npy")):  # one for each bundle
        bundle = work / logits_path.stem
        with ortgpt.load(bundle) as generator:
            cache = generator.engine.new_cache(1, len(ids))
            logits = generator.engine.prefill(cache, [ids], np.arange(len(ids))[None])[0]
        diff = float(np.abs(logits - np.load(logits_path)).max())
        bound = open_bundle(bundle).manifest.precision.promise.logit_bound or 1e-3
        report(f"{bundle.name}: largest difference (accepted {2 * bound:.2g})", f"{diff:.2g}", diff <= 2 * bound)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
