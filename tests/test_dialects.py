"""Every dialect of checkpoint, exported, against the ids that its own framework generates."""

from __future__ import annotations

from pathlib import Path

import pytest

import ortgpt
from dialects import DIALECTS
from ortgpt_exporter import export_bundle

PROMPTS = [[5], list(range(40, 60)), [299, 7, 8]]


@pytest.mark.parametrize("name", DIALECTS)
def test_greedy_ids_of_every_dialect_equal_its_own_frameworks(name: str, tmp_path: Path) -> None:
    standin = DIALECTS[name](tmp_path / "checkpoint")
    notes: list[str] = []
    bundle = export_bundle(standin.source, tmp_path / "bundle", on_note=notes.append)
    with ortgpt.load(bundle.path) as generator:
        token_ids = [row.token_ids for row in generator.generate_batch(PROMPTS, max_new_tokens=24, eos_token_id=[])]
    assert token_ids == [standin.greedy(prompt, 24) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in token_ids}) == 3
    assert any("weights_only=True" in note for note in notes) == name.startswith(("bin", "dialogpt", "nanogpt"))
    assert bundle.manifest.masked_tokens == {"padded-vocabulary": 4}.get(name, 20 if "nanogpt" in name else 0)
