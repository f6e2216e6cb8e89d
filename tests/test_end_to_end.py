"""The main job: a GPT-2-small stand-in with the real vocabulary, and the bundled model, from checkpoint to text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

import ortgpt
from ortgpt_exporter.checkpoint.load import find_folder
from support import greedy_ids

PROMPTS = [
    "The meaning of life is",
    "Hello, I'm a language model,",
    "",
    "def fibonacci(n):\n    ",
    "日本語のテキスト",
    "In 1813, Jane Austen published",
    "👩‍👩‍👧 and",
    "  leading and trailing  ",
    "a",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
    * 3,
]


@pytest.fixture(scope="module")
def standin(standin_bundle: Path) -> Iterator[ortgpt.Generator]:
    with ortgpt.load(standin_bundle) as generator:
        yield generator


@pytest.fixture(scope="module")
def standin_model(standin_checkpoint: Path) -> Any:
    return GPT2LMHeadModel.from_pretrained(standin_checkpoint).eval()


def test_the_standin_is_like_gpt2(standin_model: Any) -> None:
    with torch.no_grad():
        logits = standin_model(torch.arange(64)[None] * 700).logits
    assert -130 < logits.mean().item() < -70
    assert logits.shape[-1] == 50258


def test_greedy_ids_equal_transformers_on_ten_prompts(standin: ortgpt.Generator, standin_model: Any) -> None:
    prompts = [standin.tokenizer.encode(prompt) or [50256] for prompt in PROMPTS]
    want = [greedy_ids(standin_model, prompt, 64) for prompt in prompts]
    assert len({tuple(ids) for ids in want}) == 10
    found = [standin.generate(prompt, max_new_tokens=64, eos_token_id=[]) for prompt in prompts]
    assert [completion.token_ids for completion in found] == want
    together = standin.generate_batch(prompts, max_new_tokens=64, eos_token_id=[])
    assert [completion.token_ids for completion in together] == want


def test_sampled_rows_of_a_batch_equal_their_solo_runs(standin: ortgpt.Generator) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 16, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7,
    }  # fmt: skip
    together = standin.generate_batch(PROMPTS, **options)
    assert [standin.generate(prompt, **options).token_ids for prompt in PROMPTS] == [row.token_ids for row in together]


def test_score_equals_the_loss_of_transformers(standin: ortgpt.Generator, standin_model: Any) -> None:
    text = PROMPTS[-1]
    ids = standin.tokenizer.encode(text)
    inputs = torch.tensor([[50256, *ids]])
    with torch.no_grad():
        loss = standin_model(inputs, labels=inputs).loss.item()
    assert standin.score(text).nll / len(ids) == pytest.approx(loss, abs=1e-4)


def test_the_added_token_comes_along(standin: ortgpt.Generator) -> None:
    assert standin.bundle.manifest.masked_tokens == 0
    assert standin.tokenizer.decode([50257]) == "<|pad|>"
    assert standin.generate([50257, 1], max_new_tokens=2).token_ids


def test_the_bundle_is_no_larger_than_its_weights(standin_bundle: Path) -> None:
    size = sum(path.stat().st_size for path in standin_bundle.iterdir())
    assert (standin_bundle / "model.onnx").stat().st_size <= 1.02 * 4 * (124_439_808 + 768)
    assert size <= 508e6


def test_the_verification_is_in_the_manifest(standin_bundle: Path) -> None:
    checks = json.loads((standin_bundle / "ortgpt.json").read_text())["verification"]
    assert [check["name"] for check in checks][3] == "prefill of 1024"
    for check in checks:
        assert check["max_abs_diff"] <= check["tolerance"]
        assert check["max_abs_logit"] > 90 or check["name"].startswith("hidden states")
        assert check["argmax_differing"] == 0


def test_the_bundled_model_is_small_and_told_of(tmp_path: Path) -> None:
    folder = find_folder("austen")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12_000_000
    record = json.loads((folder / "training.json").read_text())
    assert record["held_out"] == "northangerabbey.txt"
    assert record["held_out_bits_per_byte"] <= 1.60
    assert f"{record['held_out_bits_per_byte']:.3f}" in (folder / "README.md").read_text()


def test_the_bundled_model_equals_transformers_and_knows_its_period(austen_bundle: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(find_folder("austen"), dtype=torch.float32).eval()
    with ortgpt.load(austen_bundle) as generator:
        for prompt in ("It is a truth universally acknowledged,", '"My dear Mr. Bennet," said his lady', "Emma"):
            ids = generator.tokenizer.encode(prompt)
            assert generator.generate(prompt, max_new_tokens=64, eos_token_id=[]).token_ids == greedy_ids(
                model, ids, 64
            )
        likely = "She was not at all surprised to see him in the morning."
        shuffled = "morning surprised all She the in not was to see him at."
        assert generator.score(likely).nll < generator.score(shuffled).nll - 10
        text = generator.generate("She was", max_new_tokens=200, temperature=0.8, top_p=0.95, seed=1).text
        words = text.split()
        assert len(words) > 80
        assert len(set(words)) > 50
        assert np.mean([word.isascii() for word in words]) == 1.0


def test_prompts_around_the_attention_block_equal_their_solo_prefill_to_the_bit(austen_bundle: Path) -> None:
    random = np.random.default_rng(0)
    with ortgpt.load(austen_bundle) as generator:
        engine = generator.engine
        for length in (1, 2, 63, 64, 65, 127, 128, 129, 130, 200):
            rows = [random.integers(4096, size=size).tolist() for size in (length, length + 7, 3)]
            alone = engine.prefill(engine.new_cache(1, length), rows[:1])[0]
            assert np.array_equal(engine.prefill(engine.new_cache(3, length + 7), rows)[0], alone)
            assert np.array_equal(engine.prefill(engine.new_cache(2, length), [rows[0], rows[2]])[0], alone)
            model = GPT2LMHeadModel.from_pretrained(find_folder("austen"), dtype=torch.float32).eval()
            with torch.no_grad():
                want = model(torch.tensor(rows[:1])).logits[0, -1].numpy()
            assert np.abs(alone[0] - want).max() <= 1e-4 * np.abs(want).max()
