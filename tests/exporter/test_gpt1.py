"""Bundles of GPT-1 against `OpenAIGPTLMHeadModel`, which recomputes every token; with post-norm in every precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, OpenAIGPTLMHeadModel

import ortgpt
from ortgpt.bundle.folder import Bundle, open_bundle
from ortgpt.cli.report import info_lines
from ortgpt.errors import PromptError
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt.tools.bench import bench_bundle
from ortgpt.tools.seal import seal_bundle
from ortgpt_exporter import CheckpointSource, Quantization, export_bundle, quantize_bundle
from ortgpt_exporter.evaluation.sample import split_rows
from ortgpt_exporter.sweep import sweep_bundle
from ortgpt_models import GPT, GPTConfig, save_gpt
from support import (
    SMALL_VOCAB,
    TEXT,
    greedy_ids,
    name_gpt2_tokenizer,
    random_model,
    write_checkpoint,
    write_small_tokenizer,
)

PROMPTS = [[40, 3, 77, 200, 5], [9], [250, 7, 7, 31, 120, 18, 4, 2, 66]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of 12, which a native graph pads to 16."""
    return write_checkpoint(tmp_path_factory.mktemp("gpt1") / "checkpoint", seed=31, family="openai-gpt")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied") / "checkpoint"
    return write_checkpoint(folder, seed=32, family="openai-gpt", tie_word_embeddings=False, afn="silu", n_layer=3)


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, untied: Path) -> dict[tuple[str, str], Bundle]:
    return {
        (name, flavour): export_bundle(folder, folder.parent / flavour, flavour=flavour, on_note=lambda note: None)
        for name, folder in (("tied", checkpoint), ("untied", untied))
        for flavour in ("native", "portable")
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-1 that has learnt a text, so that rounding meets weights with structure; its folder holds the text."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    folder.mkdir()
    write_small_tokenizer(folder)
    name_gpt2_tokenizer(folder)
    (folder.parent / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    shape = {"vocab_size": SMALL_VOCAB, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    torch.manual_seed(33)
    gpt = GPT(GPTConfig.from_dict({"model_type": "openai-gpt"} | shape))
    ids = torch.tensor(ByteLevelBPE.load(folder).encode(TEXT))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    for _ in range(120):
        starts = torch.randint(len(ids) - 33, (8, 1))
        windows = ids[starts + torch.arange(33)]
        loss = torch.nn.functional.cross_entropy(gpt(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
    assert loss < 2.0
    save_gpt(gpt.eval(), folder)
    return folder


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("flavour", ["native", "portable"])
@torch.no_grad()
def test_cached_steps_equal_the_recomputation_of_transformers(
    bundles: dict[tuple[str, str], Bundle], name: str, flavour: str, request: pytest.FixtureRequest
) -> None:
    theirs = OpenAIGPTLMHeadModel.from_pretrained(request.getfixturevalue({"tied": "checkpoint"}.get(name, name)))
    rows = [[*ids, *(np.arange(40) * (11 + row) % SMALL_VOCAB).tolist()] for row, ids in enumerate(PROMPTS)]
    expected = [theirs.eval()(torch.tensor([row])).logits[0].numpy() for row in rows]
    with ortgpt.load(bundles[name, flavour].path) as generator:
        engine = generator.engine
        cache = engine.new_cache(len(PROMPTS), max(map(len, rows)))
        found = [engine.prefill(cache, PROMPTS)[:, 0]]
        forward = engine.new_forward(cache)
        for step in range(40):
            forward.input_ids[:, 0] = [row[len(ids) + step] for ids, row in zip(PROMPTS, rows, strict=True)]
            forward.run(cache.lengths + 1)
            found.append(forward.logits()[:, 0].copy())
    for index, (ids, logits) in enumerate(zip(PROMPTS, expected, strict=True)):
        ours = np.stack([step[index] for step in found])
        assert logits.std() > 0.02
        assert np.abs(ours - logits[len(ids) - 1 :]).max() <= 1e-4


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("flavour", ["native", "portable"])
def test_ragged_batches_give_the_greedy_tokens_of_transformers(
    bundles: dict[tuple[str, str], Bundle], name: str, flavour: str, request: pytest.FixtureRequest
) -> None:
    """Row by row there: its GPT-1 takes no positions from the mask, so it cannot pad on the left."""
    theirs = OpenAIGPTLMHeadModel.from_pretrained(request.getfixturevalue({"tied": "checkpoint"}.get(name, name)))
    with ortgpt.load(bundles[name, flavour].path) as generator:
        found = generator.generate_batch(PROMPTS, max_new_tokens=40)
    for ids, completion in zip(PROMPTS, found, strict=True):
        assert list(completion.token_ids) == greedy_ids(theirs.eval(), ids, 40)
        assert len(set(completion.token_ids)) > 3


def test_the_bundle_says_what_the_network_is(bundles: dict[tuple[str, str], Bundle]) -> None:
    for bundle in bundles.values():
        manifest = json.loads((bundle.path / "ortgpt.json").read_text())
        assert manifest["architecture"] == {"norm": "post"}
        assert manifest["format"]["minor"] >= 4
        assert all(check["max_abs_diff"] <= 1e-4 for check in manifest["verification"])
        config = AutoConfig.from_pretrained(bundle.path)
        assert (config.model_type, config.n_positions, config.eos_token_id) == ("openai-gpt", 64, None)
        assert any("post-norm" in line for line in info_lines(open_bundle(bundle.path)))
    assert config.afn == "silu"


def test_without_a_start_the_first_token_is_given_and_not_predicted(
    bundles: dict[tuple[str, str], Bundle], checkpoint: Path
) -> None:
    """GPT-1 has no token that begins or ends a text."""
    theirs = OpenAIGPTLMHeadModel.from_pretrained(checkpoint).eval()
    with ortgpt.load(bundles["tied", "native"].path) as generator:
        with pytest.raises(PromptError, match="no token to start a text from"):
            generator.generate("")
        ids = generator.tokenizer.encode("It is a truth")
        score = generator.score("It is a truth")
        assert (score.tokens, score.token_ids) == (len(ids) - 1, ids[1:])
        assert score.text_bytes == len("It is a truth") - generator.tokenizer.size_bytes(ids[:1])
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(torch.tensor([ids])).logits[0], -1).numpy()
        np.testing.assert_allclose(score.token_logprobs, logprobs[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
        for nothing in ("", ids[:1]):
            with pytest.raises(PromptError, match="nothing to score"):
                generator.score(nothing)
        assert len(generator.generate("It is", max_new_tokens=60).token_ids) == 60
        assert generator.choose("It is", [" a truth", " a wife"])[0].score < 0


def _first_score(qkv: torch.Tensor) -> float:
    return (qkv[0, 0, :16] @ qkv[0, 0, 64:80]).item() / 4


@pytest.mark.parametrize(("target", "flavour"), [("cpu", "native"), ("cuda", "native"), ("cpu", "portable")])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_float16_is_finite_and_close_also_with_large_activations(
    scale: float, target: str, flavour: str, tmp_path: Path
) -> None:
    """The larger network adds numbers above 1,000 before its LayerNorms, and attention scores below -100."""
    model = random_model(34, "openai-gpt", vocab_size=SMALL_VOCAB, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "c_attn.bias" in name:
                parameter[:64].abs_().mul_(2 * scale)
                parameter[64:128] = -parameter[:64]
            elif ".c_proj." in name:
                parameter *= scale**2
    sums: list[float] = []
    scores: list[float] = []
    for block in model.transformer.h:
        block.ln_1.register_forward_hook(lambda module, inputs, out: sums.append(inputs[0].abs().max().item()))
        block.attn.c_attn.register_forward_hook(lambda module, inputs, out: scores.append(_first_score(out)))
    model(torch.tensor(PROMPTS[:1]))
    assert scale == 1 or (min(sums) > 1000 and min(scores) < -100)
    model.save_pretrained(tmp_path / "checkpoint")
    write_small_tokenizer(tmp_path / "checkpoint")
    name_gpt2_tokenizer(tmp_path / "checkpoint")
    bundle = export_bundle(tmp_path / "checkpoint", tmp_path / "out", dtype="float16", target=target, flavour=flavour)
    assert all(check.passed and np.isfinite(check.max_abs_diff) for check in bundle.manifest.verification)
    if target == "cpu":
        with ortgpt.load(bundle.path) as generator:
            assert len(generator.generate(PROMPTS[0], max_new_tokens=20).token_ids) == 20


GPTQ = {"method": "gptq", "head_dtype": "int8"}
RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("native", {"dtype": "int8"}),
    ("native", {"dtype": "int8", "method": "w8a8"}),
    ("native", {"dtype": "int4"}),
    ("native", {"dtype": "int4", **GPTQ}),
    ("portable", {"dtype": "int8"}),
    ("portable", {"dtype": "int4", **GPTQ}),
]


@pytest.fixture(scope="module")
def float32(trained: Path) -> dict[str, Path]:
    return {
        flavour: export_bundle(trained, trained.parent / flavour, flavour=flavour).path
        for flavour in ("native", "portable")
    }


@pytest.mark.parametrize(("flavour", "values"), RECIPES)
@pytest.mark.parametrize("measured_on", ["the model's own text", "a text"])
def test_every_recipe_passes_its_gate(
    float32: dict[str, Path], trained: Path, tmp_path: Path, flavour: str, values: dict[str, Any], measured_on: str
) -> None:
    text = trained.parent / "text.txt"
    request = Quantization(
        **values,
        calibration=text if values.get("method") == "gptq" else None,
        eval_text=text if measured_on == "a text" else None,
    )
    bundle = quantize_bundle(float32[flavour], tmp_path / "out", request)
    evidence = bundle.manifest.evidence
    assert bundle.manifest.architecture.norm == "post"
    assert evidence is not None
    assert 1 < evidence.baseline_perplexity < 30
    assert 0 < evidence.kl < (0.01 if values["dtype"] == "int8" else 0.1)
    if measured_on == "a text":  # every token but the first, which nothing predicts
        ids = ByteLevelBPE.load(trained).encode(text.read_text(encoding="utf-8"))
        assert evidence.tokens == len(ids) - 1
    with ortgpt.load(bundle.path) as generator:
        alone = generator.generate("It is a truth", max_new_tokens=30).token_ids
        assert generator.generate_batch(["It is a truth"] * 2, max_new_tokens=30)[1].token_ids == alone
    assert len(bundle.manifest.graphs) == (2 if flavour == "native" and values.get("method") != "w8a8" else 1)


def test_rows_of_a_text_without_a_start() -> None:
    assert split_rows([1, 2, 3, 4, 5], None, 3) == [[1, 2, 3], [3, 4, 5]]
    assert split_rows([1, 2, 3, 4, 5, 6], None, 3) == [[1, 2, 3], [3, 4, 5], [5, 6]]
    assert split_rows([1, 2, 3], 0, 3) == [[0, 1, 2], [0, 3]]


def test_the_tools_take_a_post_norm_bundle(float32: dict[str, Path], tmp_path: Path) -> None:
    trials = sweep_bundle(float32["native"], recipes=[Quantization(dtype="int8"), Quantization(dtype="int4")])
    assert [trial.divergence.kl < 0.2 for trial in trials] == [True, True]
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in float32["native"].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps(config | {"max_new_tokens": 5}))
    seal_bundle(copy)
    with ortgpt.load(copy) as generator:
        assert len(generator.generate("It is").token_ids) == 5
    assert bench_bundle(copy).tokens_per_s["greedy"] > 0


@pytest.mark.parametrize("target", ["c_attn", "tokens_embed"])
@torch.no_grad()
def test_an_adapter_is_merged(checkpoint: Path, tmp_path: Path, target: str) -> None:
    torch.manual_seed(35)
    base: Any = OpenAIGPTLMHeadModel.from_pretrained(checkpoint)
    adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules=[target, "c_proj"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.normal_(0.0, 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    source = CheckpointSource(checkpoint, adapter=tmp_path / "adapter")
    state = torch.get_rng_state()
    bundle = export_bundle(source, tmp_path / "out", on_note=lambda note: None)
    assert torch.equal(torch.get_rng_state(), state)
    with ortgpt.load(bundle.path) as generator:
        engine = generator.engine
        logits = engine.prefill(engine.new_cache(1, 5), [PROMPTS[0]], np.arange(5)[None])[0]
    expected = adapted(torch.tensor(PROMPTS[:1])).logits[0].numpy()
    plain = OpenAIGPTLMHeadModel.from_pretrained(checkpoint).eval()(torch.tensor(PROMPTS[:1])).logits[0].numpy()
    assert np.abs(expected - plain).max() > 0.02
    assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, float(np.abs(expected).max()))
