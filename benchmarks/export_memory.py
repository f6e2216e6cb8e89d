"""Export random weights in the shape of each preset, and print peak memory and time: `make bench-export`.

Needs 20 GB of disk for gpt2-xl; name presets or dtypes to measure fewer. Peak memory counts the pages of mapped files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PRESETS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
DTYPES = ("float32", "float16", "int8", "int4")
TESTS = Path(__file__).parents[1] / "tests"
WRITE = """
import sys; from pathlib import Path; from transformers import GPT2Config, GPT2LMHeadModel
from ortgpt_models import PRESETS; from support import write_small_tokenizer
p = PRESETS[sys.argv[1]]; folder = Path(sys.argv[2])
shape = dict(vocab_size=p.vocab_size, n_positions=p.n_positions, n_embd=p.n_embd, n_layer=p.n_layer, n_head=p.n_head)
GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
write_small_tokenizer(folder)
"""
EXPORT = """
import resource, sys, time; from ortgpt_exporter import export_bundle
started = time.perf_counter()
bundle = export_bundle(sys.argv[1], sys.argv[2], dtype=sys.argv[3])
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sum(entry.size for entry in bundle.manifest.files.values()))
"""


def run(code: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


unknown = set(sys.argv[1:]) - {*PRESETS, *DTYPES}
if unknown:
    sys.exit(f"{', '.join(sorted(unknown))} (accepted: {', '.join((*PRESETS, *DTYPES))})")
print(f"{'preset':<14}{'dtype':<10}{'peak memory, GB':>16}{'time, s':>9}{'bundle, MB':>12}")
for preset in [name for name in PRESETS if name in sys.argv] or PRESETS:
    for dtype in [name for name in DTYPES if name in sys.argv] or DTYPES:
        with tempfile.TemporaryDirectory(dir="build" if Path("build").is_dir() else None) as folder:
            run(WRITE, preset, f"{folder}/checkpoint")
            answer = run(EXPORT, f"{folder}/checkpoint", f"{folder}/out", dtype)
        seconds, peak_kb, size_bytes = map(float, answer.split())
        peak = f"{peak_kb * 1024 / 1e9:>16.1f}"
        print(f"{preset:<14}{dtype:<10}{peak}{seconds:>9.0f}{size_bytes / 1e6:>12.0f}", flush=True)
