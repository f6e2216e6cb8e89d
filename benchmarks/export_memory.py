"""Export random weights in the shape of each preset, and print peak memory and time: `make bench-export`.

Needs 20 GB of disk for gpt2-xl; name presets or dtypes to measure fewer. Peak memory counts the pages of mapped files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PRESETS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
DTYPES = ("float32", "float16", "int8", "int4")
WRITE = """
import sys; from pathlib import Path; from transformers import GPT2Config, GPT2LMHeadModel
from ortgpt_models.presets import PRESETS; from support import write_small_tokenizer
p = PRESETS[sys.argv[1]]; folder = Path(sys.argv[2])
shape = dict(vocab_size=p.vocab_size, n_positions=p.n_positions, n_embd=p.n_embd, n_layer=p.n_layer, n_head=p.n_head)
GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
write_small_tokenizer(folder)
"""
EXPORT = """
import sys; from ortgpt_exporter import export_bundle; from timing import peak_bytes, seconds
checkpoint, out, dtype = sys.argv[1:]
print(seconds(lambda: export_bundle(checkpoint, out, dtype=dtype)), peak_bytes())
"""


def run(code: str, *arguments: str) -> str:
    """Run code in a process of its own, which can import timing.py and the tests' support.py; return what it prints."""
    path = [str(HERE), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(names: list[str]) -> None:
    unknown = set(names) - {*PRESETS, *DTYPES}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))} (accepted: {', '.join((*PRESETS, *DTYPES))})")
    print(f"{'preset':<14}{'dtype':<10}{'peak memory, GB':>16}{'time, s':>9}{'bundle, MB':>12}")
    for preset in [name for name in PRESETS if name in names] or PRESETS:
        for dtype in [name for name in DTYPES if name in names] or DTYPES:
            with tempfile.TemporaryDirectory(dir="build" if Path("build").is_dir() else None) as folder:
                run(WRITE, preset, f"{folder}/checkpoint")
                export_s, peak_bytes = map(float, run(EXPORT, f"{folder}/checkpoint", f"{folder}/out", dtype).split())
                size_mb = sum(path.stat().st_size for path in Path(folder, "out").iterdir()) / 1e6
            print(f"{preset:<14}{dtype:<10}{peak_bytes / 1e9:>16.1f}{export_s:>9.0f}{size_mb:>12.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
