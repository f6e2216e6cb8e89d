"""The table of networks on the family's page says what the code builds and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ortgpt_models import GPT
from ortgpt_models.config import POST, PRE
from ortgpt_models.presets import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "family.md"
COLUMNS = {
    "GPT-1": "gpt1",
    "MiniGPT": "minigpt",
    "GPT-2": "gpt2",
    "GPT-2 medium": "gpt2-medium",
    "GPT-2 large": "gpt2-large",
    "GPT-2 XL": "gpt2-xl",
}


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the page's first table by column, then by row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    rows = rows[: next((place for place, row in enumerate(rows) if len(row) != len(head)), len(rows))]
    return {column: {row[0]: row[place] for row in rows} for place, column in enumerate(head) if place}


def test_the_table_has_every_network() -> None:
    assert [*table()] == [*COLUMNS]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_what_the_network_has(column: str) -> None:
    config, cells = PRESETS[COLUMNS[column]], table()[column]
    with torch.device("meta"):
        gpt = GPT(config)
    numbers = {
        "layers": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "context, tokens": config.n_positions,
        "vocabulary": config.vocab_size,
        "parameters": sum(parameter.numel() for parameter in gpt.parameters()),
    }
    assert {name: int(cells[name].replace(",", "")) for name in numbers} == numbers
    norms = {"after each residual": POST, "before attention and MLP": PRE, "as MiniGPT": PRESETS["minigpt"].norm}
    assert norms[cells["LayerNorm"]] == config.norm


@pytest.mark.parametrize("preset", ["gpt1", "minigpt", "gpt2"])
def test_initial_weights_are_what_the_table_says(preset: str) -> None:
    config = PRESETS[preset]
    torch.manual_seed(0)
    gpt: Any = GPT(config)
    scale = (2 * config.n_layer) ** -0.5 if config.norm == PRE else 1.0
    for block in gpt.h:
        for weight, std in ((block.attn.c_attn.weight, 0.02), (block.mlp.c_proj.weight, 0.02 * scale)):
            assert weight.std().item() == pytest.approx(std, rel=0.02)
