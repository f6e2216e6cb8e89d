"""Networks with a head of their own, and with widths that no block divides, in every precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GPT2LMHeadModel

import ortgpt
from ortgpt.bundle.folder import Bundle, open_bundle
from ortgpt.cli.report import info_lines
from ortgpt_exporter import Quantization, export_bundle
from ortgpt_exporter.evaluation.divergence import compare
from ortgpt_exporter.evaluation.sample import split_rows
from ortgpt_exporter.judges import calibration_for, open_float32
from ortgpt_exporter.quantization.write import open_quantized, write_quantized
from ortgpt_exporter.quantize import recipe_for
from support import TEXT, greedy_ids, write_checkpoint

PROMPT = [40, 3, 77, 200, 5]


def untie(folder: Path) -> Path:
    """Store a head that has little in common with the embedding, and say so in config.json."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = {"lm_head.weight": tensors["transformer.wte.weight"].flip(0).contiguous() * 1.5}
    save_file(tensors | head, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untie(write_checkpoint(tmp_path_factory.mktemp("untied") / "checkpoint", seed=21, n_embd=64))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five heads of 7, padded to 8 in a native graph; no width is a multiple of 16, some are odd."""
    folder = tmp_path_factory.mktemp("odd") / "checkpoint"
    return untie(write_checkpoint(folder, seed=22, n_embd=35, n_head=5, n_inner=90, activation_function="quick_gelu"))


@pytest.fixture(scope="module")
def tied_odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied-odd") / "checkpoint"
    return write_checkpoint(folder, seed=23, n_embd=100, n_inner=77, activation_function="gelu_pytorch_tanh")


@pytest.fixture(scope="module")
def bundles(untied: Path, odd: Path, tied_odd: Path) -> dict[tuple[str, str], Bundle]:
    return {
        (name, flavour): export_bundle(folder, folder.parent / flavour, flavour=flavour, on_note=lambda note: None)
        for name, folder in (("untied", untied), ("odd", odd), ("tied odd", tied_odd))
        for flavour in ("native", "portable")
    }


@pytest.mark.parametrize("name", ["untied", "odd"])
@pytest.mark.parametrize("flavour", ["native", "portable"])
@torch.no_grad()
def test_an_untied_head_predicts_what_transformers_does(
    bundles: dict[tuple[str, str], Bundle], name: str, flavour: str, request: pytest.FixtureRequest
) -> None:
    bundle = bundles[name, flavour]
    checkpoint = request.getfixturevalue(name)
    theirs = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    assert AutoConfig.from_pretrained(bundle.path).tie_word_embeddings is False
    assert any("a head that is not the token embedding" in line for line in info_lines(open_bundle(bundle.path)))
    with ortgpt.load(bundle.path) as generator:
        ids = generator.generate(PROMPT, max_new_tokens=40, eos_token_id=[]).token_ids
        assert list(ids) == greedy_ids(theirs, PROMPT, 40)
        engine = generator.engine
        logits = engine.prefill(engine.new_cache(1, 45), [[*PROMPT, *ids]], np.arange(45)[None])[0]
    expected = theirs(torch.tensor([[*PROMPT, *ids]])).logits[0].numpy()
    assert np.abs(logits - expected).max() <= 1e-4


@pytest.mark.parametrize(("target", "flavour"), [("cpu", "native"), ("cuda", "native"), ("cpu", "portable")])
def test_an_untied_head_in_float16(untied: Path, tmp_path: Path, target: str, flavour: str) -> None:
    notes: list[str] = []
    bundle = export_bundle(
        untied, tmp_path / "out", dtype="float16", target=target, flavour=flavour, on_note=notes.append
    )
    assert all(check.passed for check in bundle.manifest.verification)
    assert notes == ["the head is not the token embedding; as a matrix of its own it adds about 0.04 MB in float16"]


GPTQ = {"method": "gptq", "calibration": ""}
RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("native", {"dtype": "int8"}),
    ("native", {"dtype": "int8", "method": "w8a8"}),
    ("native", {"dtype": "int8", "block_size": 16}),
    ("native", {"dtype": "int8", **GPTQ}),
    ("native", {"dtype": "int4"}),
    ("native", {"dtype": "int4", "head_dtype": "int8", **GPTQ}),
    ("portable", {"dtype": "int8"}),
    ("portable", {"dtype": "int4"}),
    ("portable", {"dtype": "int4", **GPTQ}),
]


@pytest.mark.parametrize(
    ("name", "flavour", "values"),
    [
        (name, *recipe)
        for name, recipes in (("untied", RECIPES), ("odd", RECIPES), ("tied odd", RECIPES[1::3]))
        for recipe in recipes
    ],
)
def test_every_recipe_predicts_nearly_what_float32_does(
    bundles: dict[tuple[str, str], Bundle], tmp_path: Path, name: str, flavour: str, values: dict[str, Any]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 3, encoding="utf-8")
    source = open_bundle(bundles[name, flavour].path)
    request = Quantization(**values | ({"calibration": text} if "calibration" in values else {}))
    recipe = recipe_for(source, request)
    model = open_float32(source)
    folder = tmp_path / "quantised"
    folder.mkdir()
    report = write_quantized(
        source, folder, recipe, calibration=calibration_for(source, recipe, model.tokenizer, request)
    )
    assert sum(report.quantized.values()) >= 2 * 4 + (2 if name == "tied odd" else 3)
    rows = split_rows(model.tokenizer.encode(TEXT), model.start_id, 64)
    engine = open_quantized(source, folder)
    assert (engine.prefill_graph is not None) == (flavour == "native" and values.get("method") != "w8a8")
    short = [row[:20] for row in rows]  # the other graph takes prompts of 32 tokens and more
    for lengths in (rows, short):
        divergence = compare(model.engine, engine, lengths)
        assert divergence.kl < (0.005 if values["dtype"] == "int8" else 0.15)
        assert divergence.kl > 0


def test_a_quantised_bundle_of_an_odd_network_is_written_with_its_evidence(
    untied: Path, odd: Path, tmp_path: Path
) -> None:
    for folder, megabytes in ((untied, "0.02"), (odd, "0.01")):
        notes: list[str] = []
        quantization = Quantization(dtype="int8", max_perplexity_ratio=1.05)
        out = tmp_path / folder.parent.name
        bundle = export_bundle(folder, out, dtype="int8", quantization=quantization, on_note=notes.append)
        assert notes == [
            f"the head is not the token embedding; as a matrix of its own it adds about {megabytes} MB in int8"
        ]
        assert bundle.manifest.evidence is not None
        with ortgpt.load(out) as generator, ortgpt.load(out) as other:
            assert generator.generate(PROMPT).token_ids == other.generate(PROMPT).token_ids


def test_the_head_costs_what_the_note_says(bundles: dict[tuple[str, str], Bundle], tmp_path: Path) -> None:
    notes: list[str] = []
    plain = export_bundle(
        write_checkpoint(tmp_path / "tied", seed=21, n_embd=64), tmp_path / "out", on_note=notes.append
    )
    assert notes == []
    sizes = [sum(entry.size for entry in each.manifest.files.values()) for each in (plain, bundles["untied", "native"])]
    assert sizes[1] - sizes[0] == pytest.approx(4 * 300 * 64, abs=2000)


def test_the_command_names_what_it_left_out_and_writes_the_language_model(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", seed=24)
    model = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
    path = checkpoint / "model.safetensors"
    wrapped = {f"module.{key}": value for key, value in load_file(path).items()}
    save_file(wrapped | {"v_head.summary.weight": torch.ones(1, 48)}, path, metadata={"format": "pt"})
    command = [sys.executable, "-m", "ortgpt", "export", str(checkpoint), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("Note: ")]
    assert len(notes) == 2
    assert "the prefix module. before the network's tensors, as in module.transformer." in notes[0]
    assert "v_head.summary.weight" in notes[1]
    with ortgpt.load(tmp_path / "out") as generator:
        ids = generator.generate(PROMPT, max_new_tokens=30, eos_token_id=[]).token_ids
    assert list(ids) == greedy_ids(model, PROMPT, 30)
