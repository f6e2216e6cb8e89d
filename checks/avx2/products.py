"""Known products of integers in every kind of node, and the logits of bundles, on the CPU that this runs on.

products.py WORK_FOLDER: reads the graphs and logits that run.py wrote there. Exits with 1 where anything is wrong, also
where the CPU has no kernels that saturate: then nothing would be shown.
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
    wrong = 0

    def tell(what: str, found: object, good: bool) -> None:
        nonlocal wrong
        wrong += not good
        print(f"{what:<56}{found!s:>14}  {'as expected' if good else 'WRONG'}")  # noqa: T201  # its table

    exact = multiplies_exactly(onnxruntime)
    tell("u8 x s8 as it comes is exact", exact, not exact)
    for expected in json.loads((work / "products.json").read_text()):
        x = np.full((expected["rows"], expected["width"]), expected["x"], expected["dtype"])
        found = product(work / expected["graph"], {"x": x})
        good = bool(np.abs(found.astype(np.float64) - expected["y"]).max() <= expected["tolerance"] * expected["y"])
        tell(f"{expected['graph']}, {expected['rows']} rows: {expected['y']:,.0f}", f"{found.flat[0]:,.0f}", good)
    ids = json.loads((work / "ids.json").read_text())
    for logits_path in sorted(work.glob("*.npy")):  # run.py wrote one a bundle
        bundle = work / logits_path.stem
        with ortgpt.load(bundle) as generator:
            cache = generator.engine.new_cache(1, len(ids))
            logits = generator.engine.prefill(cache, [ids], np.arange(len(ids))[None])[0]
        moved = float(np.abs(logits - np.load(logits_path)).max())
        bound = open_bundle(bundle).manifest.precision.promise.logit_bound or 1e-3
        tell(f"{bundle.name}: logits differ at most by (accepted {2 * bound:.2g})", f"{moved:.2g}", moved <= 2 * bound)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
