"""Generate with portable bundles in unmodified Optimum, onnxruntime-genai and Transformers.js, and compare the tokens.

`make check-portable` sets the three environments up and runs this: run.py WORK_FOLDER OPTIMUM_PYTHON GENAI_PYTHON
NODE_FOLDER. In float32 the ids have to be those of `transformers`; in 8 and 4 bits those of this runtime. In a padded
batch of 8 or 4 bits, two tokens may change places if their logits are as close as the bundle's bound allows. Prints a
table; exits with 1 if a program differs.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import greedy_ids, write_checkpoint, write_standin  # needs the path above

HERE = Path(__file__).parent
TEXTS = [
    "The meaning of life is",
    "Hello, I'm a language model,",
    "a",
    "日本語のテキスト 👩‍👩‍👧",
    "  In 1813, Jane Austen  published\n\n",
]
NEW_TOKENS = 24
DYNAMIC = "dynamic-avx2"


def transformers_ids(checkpoint: Path) -> dict[str, Any]:
    model = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    solo = [greedy_ids(model, prompt, NEW_TOKENS) for prompt in prompts]
    return {"prompts": prompts, "solo": solo, "batch": solo}


def ortgpt_ids(bundle: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
    with ortgpt.load(bundle) as generator:
        return {
            "prompts": [generator.tokenizer.encode(text) for text in TEXTS],
            "solo": [generator.generate(text, **settings).token_ids for text in TEXTS],
            "batch": [row.token_ids for row in generator.generate_batch(TEXTS, **settings)],
        }


def program_ids(command: list[str], bundle: Path) -> dict[str, Any]:
    job = json.dumps({"texts": TEXTS, "max_new_tokens": NEW_TOKENS})
    ids: dict[str, Any] = json.loads(run([*command, str(bundle)], job))
    return ids


def run(command: list[str], text: str = "") -> str:
    """Run a command with `text` as its input, and return what it prints."""
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout


def main() -> None:
    work, optimum, genai, node = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    shutil.copy(HERE / "transformersjs_ids.mjs", node)  # beside its node_modules
    commands = {
        "optimum": [optimum, str(HERE / "optimum_ids.py")],
        "onnxruntime-genai": [genai, str(HERE / "genai_ids.py")],
        "transformers.js": ["node", str(node / "transformersjs_ids.mjs")],
    }
    makers = {"standin": write_standin, "small": write_checkpoint}
    differences = 0
    for name, write in makers.items():
        checkpoint = work / f"{name}-checkpoint"
        if not checkpoint.is_dir():
            write(checkpoint)
        expected = transformers_ids(checkpoint)
        for precision, bundle in write_bundles(checkpoint, work / f"{name}-portable", optimum).items():
            ours = ortgpt_ids(bundle)
            if precision != "float32":
                # Optimum's recipe has one scale for all rows, so each program rounds a padded batch differently.
                expected = {part: ids for part, ids in ours.items() if (precision, part) != (DYNAMIC, "batch")}
            bound = open_bundle(bundle).manifest.precision.promise.logit_bound or 0.0
            max_gaps = {"prompts": 0.0, "solo": 0.0, "batch": 2 * bound}
            results = {"ortgpt": ours} if precision == "float32" else {}
            results |= {program: program_ids(command, bundle) for program, command in commands.items()}
            for program, ids in results.items():
                same = {
                    part: all(
                        map(partial(is_same, bundle, max_gaps[part]), expected["prompts"], expected[part], ids[part])
                    )
                    for part in expected
                }
                differences += sum(not is_equal for is_equal in same.values())
                shown = "  ".join(f"{part} {'same' if is_equal else 'DIFFERENT'}" for part, is_equal in same.items())
                print(f"{name:<10}{precision:<16}{program:<20}{shown}", flush=True)
    sys.exit(differences > 0)


def is_same(bundle: Path, max_gap: float, prompt: list[int], expected: list[int], ids: list[int]) -> bool:
    """Tell whether ids are as expected, or the logits of the first two that differ are at most `max_gap` apart."""
    expected, ids = until_end(bundle, expected), until_end(bundle, ids)
    place = next((i for i, (one, other) in enumerate(zip(expected, ids, strict=False)) if one != other), None)
    if place is None or max_gap == 0:
        return ids == expected
    with ortgpt.load(bundle) as generator:
        common = [*prompt, *expected[:place]]
        logits = generator.engine.prefill(generator.engine.new_cache(1, len(common)), [common])[0, 0]
    return float(logits[expected[place]] - logits[ids[place]]) <= max_gap


def until_end(bundle: Path, ids: list[int]) -> list[int]:
    """Return the ids before the first end-of-text, where onnxruntime-genai stops."""
    ends = open_bundle(bundle).config.eos_token_ids
    place = next((i for i, token_id in enumerate(ids) if token_id in ends), len(ids))
    return ids[:place]


def write_bundles(checkpoint: Path, out: Path, optimum: str) -> dict[str, Path]:
    """Write a bundle of each precision, and return them by name; Optimum's recipe runs in its environment."""
    shutil.rmtree(out, ignore_errors=True)
    bundles = {"float32": export_bundle(checkpoint, out / "float32", flavour="portable").path}
    for dtype in ("int8", "int4"):
        quantization = Quantization(dtype=dtype, max_perplexity_ratio=2)
        bundles[dtype] = quantize_bundle(bundles["float32"], out / dtype, quantization).path
    bundles[DYNAMIC] = out / DYNAMIC
    command = [optimum, "-m", "ortgpt", "quantize", str(bundles["float32"]), "-o", str(bundles[DYNAMIC])]
    run([*command, "--dtype", "int8", "--method", DYNAMIC, "--max-perplexity-ratio", "2"])
    return bundles


if __name__ == "__main__":
    main()
