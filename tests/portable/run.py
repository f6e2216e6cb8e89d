"""Open a portable bundle in unmodified Optimum, onnxruntime-genai and Transformers.js: the ids must be transformers'.

`make test-portable` sets the three environments up and runs this: run.py WORK_FOLDER OPTIMUM_PYTHON GENAI_PYTHON
NODE_FOLDER. Prints a table; exits with 1 when any runtime differs anywhere.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GPT2LMHeadModel

import ortgpt
from ortgpt_exporter import export_bundle

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
        bundle = work / f"{name}-portable"
        if not checkpoint.is_dir():
            write(checkpoint)
        bundle = export_bundle(checkpoint, bundle, flavour="portable", force=bundle.exists()).path
        expected = expected_ids(checkpoint)
        found = {"ortgpt": ids_here(bundle)} | {who: ids_there(command, bundle) for who, command in commands.items()}
        for who, ids in found.items():
            same = {part: ids[part] == expected[part] for part in expected}
            wrong += sum(not good for good in same.values())
            shown = "  ".join(f"{part} {'same' if good else 'DIFFERENT'}" for part, good in same.items())
            print(f"{name:<10}{who:<20}{shown}")  # noqa: T201  # its table
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
