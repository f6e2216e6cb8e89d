"""Write a copy of a checkpoint with outliers: `python checks/outliers.py CHECKPOINT OUT norm|value`.

Some channels become larger by a factor, and the weights that read them smaller by the same factor, so the network
computes the same function.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from ortgpt_models import GPT, load_gpt, save_gpt

FACTOR, COUNT, SEED = 64.0, 4, 0


@torch.no_grad()
def inject(gpt: GPT, kind: str, *, factor: float = FACTOR, count: int = COUNT) -> None:
    """Scale `count` channels of each LayerNorm's output ("norm") or of each layer's values ("value"), in place."""
    random = torch.Generator().manual_seed(SEED)
    width = gpt.config.n_embd
    for block in gpt.h:
        weights = dict(block.named_parameters())
        for parameter in weights.values():
            parameter.data = parameter.data.clone()  # it may be a view of the file
        if kind == "norm":  # the function stays the same with pre-norm only
            assert gpt.config.norm == "pre"
            for norm, linear in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
                chosen = torch.randperm(width, generator=random)[:count]
                weights[f"{norm}.weight"][chosen] *= factor
                weights[f"{norm}.bias"][chosen] *= factor
                weights[f"{linear}.weight"][chosen] /= factor
        else:
            chosen = torch.randperm(width, generator=random)[:count]
            weights["attn.c_attn.weight"][:, 2 * width + chosen] *= factor
            weights["attn.c_attn.bias"][2 * width + chosen] *= factor
            weights["attn.c_proj.weight"][chosen] /= factor


def main(source: Path, out: Path, kind: str) -> None:
    gpt = load_gpt(source)
    inject(gpt, kind)
    out.mkdir()
    save_gpt(gpt, out)
    for name in ("vocab.json", "merges.txt", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
