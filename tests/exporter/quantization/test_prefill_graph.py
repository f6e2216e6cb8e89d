"""The graph for prompts: the bytes that it reads, what it computes, and when it is used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

import ortgpt
from ortgpt.bundle.folder import open_bundle
from ortgpt.cli.main import main
from ortgpt.decode.drafts import PromptLookup
from ortgpt.engine.prefill_graph import MIN_TOKENS
from ortgpt_exporter import ExportError, Quantization, export_bundle, quantize_bundle
from ortgpt_exporter.graph.save import weight_bytes
from ortgpt_exporter.quantize import recipe_for
from ortgpt_models import load_gpt
from support import TEXT, write_checkpoint

N_LAYER, N_EMBD, PADDED = 2, 96, 128  # heads of 12 are padded to 16
LAYER_WEIGHTS = N_LAYER * (4 * N_EMBD * PADDED + 8 * N_EMBD**2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("prefill") / "checkpoint", n_embd=N_EMBD, n_head=8, n_positions=96)


@pytest.fixture(scope="module")
def source(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(checkpoint, tmp_path_factory.mktemp("bundles") / "float32").path


@pytest.fixture(scope="module")
def bundles(source: Path) -> dict[str, Path]:
    text = source.parent / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    gptq: dict[str, Any] = {"method": "gptq", "calibration": text}
    quantizations = {
        "int8": Quantization(dtype="int8", max_perplexity_ratio=2.0, fast_prefill=True),
        "int4": Quantization(dtype="int4", max_perplexity_ratio=2.0, fast_prefill=True),
        "int8-blocks": Quantization(dtype="int8", max_perplexity_ratio=2.0, fast_prefill=True, block_size=32),
        "int4-gptq": Quantization(dtype="int4", max_perplexity_ratio=2.0, fast_prefill=True, **gptq),
    }
    return {name: quantize_bundle(source, source.parent / name, each).path for name, each in quantizations.items()}


@pytest.fixture
def prompt() -> list[int]:
    return [int(each) for each in np.random.default_rng(0).integers(300, size=64)]


def places(path: Path) -> set[tuple[str, str]]:
    graph = onnx.load(path, load_external_data=False).graph
    found = [{each.key: each.value for each in tensor.external_data} for tensor in graph.initializer]
    return {(place["location"], place["offset"]) for place in found if place}


def test_int8_reads_the_decoders_bytes_and_stores_none(bundles: dict[str, Path]) -> None:
    folder = bundles["int8"]
    assert not (folder / "prefill.onnx.data").exists()
    graph = onnx.load(folder / "prefill.onnx", load_external_data=False).graph
    layers = [tensor for tensor in graph.initializer if tensor.name.endswith(".bytes")]
    assert sum(int(np.prod(tensor.dims)) for tensor in layers) == LAYER_WEIGHTS
    assert {tensor.data_type for tensor in layers} == {onnx.TensorProto.INT8}
    assert places(folder / "prefill.onnx") <= places(folder / "model.onnx")
    assert (folder / "prefill.onnx").stat().st_size < 50_000
    assert open_bundle(folder).manifest.precision.parameters["row_scales"] is True


@pytest.mark.parametrize("name", ["int4", "int8-blocks", "int4-gptq"])
def test_others_store_the_layers_bytes_and_share_the_rest(bundles: dict[str, Path], name: str) -> None:
    folder = bundles[name]
    assert (folder / "prefill.onnx.data").stat().st_size == LAYER_WEIGHTS
    shared = {place for place in places(folder / "prefill.onnx") if place[0] == "model.onnx.data"}
    assert shared < places(folder / "model.onnx")
    assert len(shared) >= N_LAYER * 6 + 4  # biases and norms of the layers, the last norm, embedding and head


@torch.no_grad()
@pytest.mark.parametrize(("name", "most"), [("int8", 0.08), ("int8-blocks", 0.08), ("int4", 0.5), ("int4-gptq", 0.5)])
def test_it_computes_what_pytorch_and_the_decoder_do(
    bundles: dict[str, Path], checkpoint: Path, prompt: list[int], name: str, most: float
) -> None:
    expected = load_gpt(checkpoint)(torch.tensor([prompt]))[0].numpy()
    with ortgpt.load(bundles[name]) as generator:
        engine = generator.engine
        places = np.arange(64)[None]
        whole = engine.prefill(engine.new_cache(1, 64), [prompt], places)[0]
        cache = engine.new_cache(1, 64)
        alone = np.concatenate([engine.prefill(cache, [[token_id]])[0] for token_id in prompt])
    assert np.square(whole - expected).mean() ** 0.5 < most * expected.std()
    # The integers are the same; only activations are rounded differently.
    assert 0 < np.square(whole - alone).mean() ** 0.5 < 0.08 * expected.std()


def test_scales_too_few_for_the_file_of_weights_are_read_from_the_graph(prompt: list[int], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", n_embd=48, n_head=4, n_positions=96)
    source = export_bundle(checkpoint, tmp_path / "float32").path
    quantization = Quantization(dtype="int8", fast_prefill=True, max_perplexity_ratio=2.0)
    bundle = quantize_bundle(source, tmp_path / "int8", quantization).path
    assert not (bundle / "prefill.onnx.data").exists()
    with ortgpt.load(source) as exact, ortgpt.load(bundle) as generator:
        expected, found = (
            each.engine.prefill(each.engine.new_cache(1, 64), [prompt], np.arange(64)[None])[0]
            for each in (exact, generator)
        )
    assert np.square(found - expected).mean() ** 0.5 < 0.08 * expected.std()


def test_a_prompt_and_the_steps_after_it_share_one_cache(bundles: dict[str, Path], prompt: list[int]) -> None:
    with ortgpt.load(bundles["int8"]) as generator:
        rows = [prompt, prompt[:40], prompt[:3], prompt[:1]]
        batch = generator.generate_batch(rows, max_new_tokens=8, eos_token_id=[])
        engine = generator.engine
        for row, completion in zip(rows, batch, strict=True):
            text = [*row, *completion.token_ids]
            logits = engine.prefill(engine.new_cache(1, 96), [text], np.arange(len(text))[None])[0]
            for place, token_id in enumerate(completion.token_ids, len(row) - 1):
                gap = logits[place].max() - logits[place, token_id]
                assert gap < 0.03 * np.abs(logits).max()


def test_it_is_opened_once_by_the_first_call_of_many_tokens(
    bundles: dict[str, Path], prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = onnxruntime.InferenceSession

    def spy(path: object, *args: object, **keywords: object) -> object:
        if str(path).endswith(".onnx"):
            opened.append(Path(str(path)).name)
        return real(path, *args, **keywords)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    with ortgpt.load(bundles["int8"]) as generator:
        generator.generate(prompt[: MIN_TOKENS - 2], max_new_tokens=4)
        assert opened == ["model.onnx"]
        threads = [
            threading.Thread(target=generator.generate, args=(prompt[:MIN_TOKENS],), kwargs={"max_new_tokens": 2})
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        generator.score(prompt)
        assert opened == ["model.onnx", "prefill.onnx"]


@pytest.mark.parametrize("count", [MIN_TOKENS - 8, MIN_TOKENS])
def test_drafts_of_any_size_run_on_the_decoder(
    count: int, bundles: dict[str, Path], prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two graphs round differently, so a draft that ran on the other one could change the text."""
    with ortgpt.load(bundles["int8"]) as generator:
        engine = generator.engine
        real = engine.new_forward
        sizes: list[int] = []

        def noted(cache: Any, **shape: Any) -> Any:
            forward = real(cache, **shape)
            if not shape.get("of_long_prompts"):
                sizes.append(shape.get("sequence_length", 1))
                assert forward._session is engine.session  # type: ignore[attr-defined]  # a NativeForward
            return forward

        def propose(draft: PromptLookup, ids: Sequence[int], most: int) -> list[int]:
            return plain[len(ids) :][: min(count, most)]

        options: dict[str, Any] = {"max_new_tokens": 56, "eos_token_id": []}
        plain: list[int] = [*prompt[:MIN_TOKENS]]
        plain += generator.generate(plain, **options).token_ids
        monkeypatch.setattr(engine, "new_forward", noted)
        monkeypatch.setattr(PromptLookup, "propose", propose)
        found = generator.generate(plain[:MIN_TOKENS], prompt_lookup_num_tokens=count, **options)
        assert found.token_ids == plain[MIN_TOKENS:]
        assert max(sizes) == count + 1


def test_a_rows_own_length_chooses_the_graph(bundles: dict[str, Path], prompt: list[int]) -> None:
    """Whatever rows it is computed with, a row equals its solo run."""
    rows = [
        prompt[begin : begin + size] for begin, size in ((0, 3), (5, 31), (2, 40), (1, 8), (0, 32), (7, 1), (9, 50))
    ]
    with ortgpt.load(bundles["int8"]) as generator:
        engine = generator.engine
        together = engine.prefill(engine.new_cache(len(rows), 64), rows)
        for row, ids in enumerate(rows):
            assert np.array_equal(engine.prefill(engine.new_cache(1, 64), [ids])[0], together[row])
        options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": [], "logprobs": 0}
        batch = generator.generate_batch(rows, **options)
        for ids, completion in zip(rows, batch, strict=True):
            assert completion.token_ids == generator.generate(ids, **options).token_ids


def test_a_bundle_without_one_runs_everything_on_its_decoder(source: Path) -> None:
    with ortgpt.load(source) as generator:
        assert generator.engine.prefill_graph is None


def test_it_is_refused_if_it_would_have_no_effect(source: Path) -> None:
    bundle = open_bundle(source)
    with pytest.raises(ExportError, match="fast_prefill would have no effect"):
        recipe_for(bundle, Quantization(dtype="int8", method="w8a8", fast_prefill=True))
    portable = replace(bundle.manifest.graphs[0], flavour="portable")
    bundle = replace(bundle, manifest=replace(bundle.manifest, graphs=(portable,)))
    with pytest.raises(ExportError, match="fast_prefill would have no effect"):
        recipe_for(bundle, Quantization(dtype="int4", fast_prefill=True))


def test_the_command_line_adds_it(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "fast"
    command = [
        "quantize",
        str(source),
        "-o",
        str(out),
        "--dtype",
        "int8",
        "--fast-prefill",
        "--max-perplexity-ratio",
        "2",
    ]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert [graph.role for graph in open_bundle(out).manifest.graphs] == ["decoder", "prefill"]
    shown = CliRunner().invoke(main, ["info", str(out)]).stdout
    assert "graph prefill.onnx" in shown
    assert "fast_prefill True" in shown
    for refused, accepted in (
        (["export", str(checkpoint), "-o", str(tmp_path / "float32"), "--fast-prefill"], "with --dtype int8 or int4"),
        (["quantize", str(source), "--sweep", "--fast-prefill"], "with --sweep: --eval, --plot"),
        (["quantize", str(source), "--sweep", "--max-kl", "0", "--fast-prefill"], "with --sweep: --eval, --plot"),
    ):
        result = CliRunner().invoke(main, refused)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--fast-prefill would have no effect (accepted {accepted})" in result.stderr.replace(", --max-kl", "")
        assert ("--max-kl" in result.stderr) == ("--max-kl" in refused)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_that_have_several_views_are_counted_once(bundles: dict[str, Path], name: str) -> None:
    folder = bundles[name]
    inline = sum(
        len(tensor.raw_data) for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    )
    assert weight_bytes(ir.load(folder / "model.onnx")) == (folder / "model.onnx.data").stat().st_size + inline
