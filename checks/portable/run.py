"""Open portable bundles in unmodified Optimum, onnxruntime-genai and Transformers.js.

In float32 the ids must be transformers'; in 8 and 4 bits those of this runtime. There, in a padded batch, two tokens
may change places that lie as near to each other as the bundle promises.
`make test-portable` sets the three environments up and runs this: run.py WORK_FOLDER OPTIMUM_PYTHON GENAI_PYTHON
NODE_FOLDER. Prints a table; exits with 1 when any runtime differs anywhere.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GPT2LMHeadModel

import ortgpt
from ortgpt.bundle.folder import open_bundle
from ortgpt_exporter import Quantization, export_bundle, quantize_bundle

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support import greedy_ids, write_checkpoint, write_standin  # noqa: E402  # needs the path above

TEXTS = [
    "The meaning of life is",
    "Hello, I'm a language model,",
    "a",
    "日本語のテキスト 👩‍👩‍👧",
    "  In 1813, Jane Austen  published\n\n",
]
NEW_TOKENS = 24
DYNAMIC = "dynamic-avx2"


def expected_ids(checkpoint: Path) -> dict[str, Any]:
    model = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    solo = [greedy_ids(model, prompt, NEW_TOKENS) for prompt in prompts]
    return {"prompts": prompts, "solo": solo, "batch": solo}


def ids_here(bundle: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
    with ortgpt.load(bundle) as generator:
        return {
            "prompts": [generator.tokenizer.encode(text) for text in TEXTS],
            "solo": [generator.generate(text, **settings).token_ids for text in TEXTS],
            "batch": [row.token_ids for row in generator.generate_batch(TEXTS, **settings)],
        }


def ids_there(command: list[str], bundle: Path) -> dict[str, Any]:
    job = json.dumps({"texts": TEXTS, "max_new_tokens": NEW_TOKENS})
    done = subprocess.run([*command, str(bundle)], input=job, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    work, optimum, genai, node = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    shutil.copy(HERE / "transformersjs_ids.mjs", node)  # beside its node_modules
    commands = {
        "optimum": [optimum, str(HERE / "optimum_ids.py")],
        "onnxruntime-genai": [genai, str(HERE / "genai_ids.py")],
        "transformers.js": ["node", str(node / "transformersjs_ids.mjs")],
    }
    makers = {"standin": write_standin, "small": write_checkpoint}
    wrong = 0
    for name, write in makers.items():
        checkpoint = work / f"{name}-checkpoint"
        if not checkpoint.is_dir():
            write(checkpoint)
        expected = expected_ids(checkpoint)
        for precision, bundle in write_bundles(checkpoint, work / f"{name}-portable", optimum).items():
            here = ids_here(bundle)
            if precision != "float32":
                # One scale for all rows: a padded batch is rounded otherwise in each runtime.
                expected = {part: ids for part, ids in here.items() if (precision, part) != (DYNAMIC, "batch")}
            bound = open_bundle(bundle).manifest.precision.promise.logit_bound or 0.0
            found = {"ortgpt": here} if precision == "float32" else {}
            found |= {who: ids_there(command, bundle) for who, command in commands.items()}
            for who, ids in found.items():
                most = {"prompts": 0.0, "solo": 0.0, "batch": 2 * bound}
                same = {
                    part: all(map(partial(is_same, bundle, most[part]), expected["prompts"], expected[part], ids[part]))
                    for part in expected
                }
                wrong += sum(not good for good in same.values())
                shown = "  ".join(f"{part} {'same' if good else 'DIFFERENT'}" for part, good in same.items())
                print(f"{name:<10}{precision:<16}{who:<20}{shown}", flush=True)  # noqa: T201  # its table
    sys.exit(wrong > 0)


def is_same(bundle: Path, most: float, prompt: list[int], expected: list[int], found: list[int]) -> bool:
    """Tell whether ids are those expected, up to where the logits of both tokens lie no farther apart than `most`."""
    expected, found = until_end(bundle, expected), until_end(bundle, found)
    place = next((i for i, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), None)
    if place is None or most == 0:
        return found == expected
    with ortgpt.load(bundle) as generator:
        ids = [*prompt, *expected[:place]]
        logits = generator.engine.prefill(generator.engine.new_cache(1, len(ids)), [ids])[0, 0]
    return float(logits[expected[place]] - logits[found[place]]) <= most


def until_end(bundle: Path, ids: list[int]) -> list[int]:
    """Return ids before the first end-of-text, where onnxruntime-genai stops."""
    ends = open_bundle(bundle).config.eos_token_ids
    place = next((i for i, token_id in enumerate(ids) if token_id in ends), len(ids))
    return ids[:place]


def write_bundles(checkpoint: Path, out: Path, optimum: str) -> dict[str, Path]:
    """Write the checkpoint in each precision, by name; Optimum's own in its environment."""
    shutil.rmtree(out, ignore_errors=True)
    bundles = {"float32": export_bundle(checkpoint, out / "float32", flavour="portable").path}
    for dtype in ("int8", "int4"):
        asked = Quantization(dtype=dtype, max_perplexity_ratio=2)
        bundles[dtype] = quantize_bundle(bundles["float32"], out / dtype, asked).path
    bundles[DYNAMIC] = out / DYNAMIC
    command = [optimum, "-m", "ortgpt", "quantize", str(bundles["float32"]), "-o", str(bundles[DYNAMIC])]
    options = ["--dtype", "int8", "--method", DYNAMIC, "--max-perplexity-ratio", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return bundles


if __name__ == "__main__":
    main()
