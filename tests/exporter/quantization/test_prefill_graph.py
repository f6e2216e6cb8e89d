"""The graph for prompts: the bytes that it reads, what it computes, and when it is used."""

from __future__ import annotations

import copy
import pickle
import shutil
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
from ortgpt.ort.whole_rows import read_whole_rows
from ortgpt_exporter import Quantization, export_bundle, quantize_bundle
from ortgpt_exporter.graph.save import weight_bytes
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
        "int8-blocks": Quantization(dtype="int8", max_perplexity_ratio=2.0),
        "int8-blocks-of-16": Quantization(dtype="int8", max_perplexity_ratio=2.0, block_size=16),
        "int4": Quantization(dtype="int4", max_perplexity_ratio=2.0),
        "int4-gptq": Quantization(dtype="int4", max_perplexity_ratio=2.0, **gptq),
    }
    return {name: quantize_bundle(source, source.parent / name, each).path for name, each in quantizations.items()}


@pytest.fixture
def prompt() -> list[int]:
    return [int(each) for each in np.random.default_rng(0).integers(300, size=64)]


def place_of(tensor: Any) -> tuple[str, str]:
    place = {each.key: each.value for each in tensor.external_data}
    return place.get("location", ""), place.get("offset", "0")


def places(path: Path) -> set[tuple[str, str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {place_of(tensor) for tensor in graph.initializer if tensor.external_data}


def rows_name(node: Any) -> str:
    return str(node.input[1]).rpartition(".")[0] + ".rows"


def product_with_identity(path: Path, node: Any, columns: int) -> Any:
    """Return what a MatMulNBits of the graph multiplies by, as ONNX Runtime computes it in float32."""
    node = copy.deepcopy(node)
    for attribute in list(node.attribute):
        if attribute.name == "accuracy_level":
            node.attribute.remove(attribute)
    model = onnx.load(path)
    weights = [tensor for tensor in model.graph.initializer if tensor.name in node.input]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "product",
        [value(node.input[0], onnx.TensorProto.FLOAT, ["rows", columns])],
        [value(node.output[0], onnx.TensorProto.FLOAT, None)],
        weights,
    )
    opsets = [onnx.helper.make_opsetid(each.domain, each.version) for each in model.opset_import]
    one = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    session = onnxruntime.InferenceSession(one.SerializeToString())
    return session.run(None, {node.input[0]: np.eye(columns, dtype=np.float32)})[0]


@pytest.mark.parametrize("name", ["int8-blocks", "int8-blocks-of-16", "int4", "int4-gptq"])
def test_it_has_no_bytes_of_its_own(bundles: dict[str, Path], name: str) -> None:
    folder = bundles[name]
    assert sorted(path.name for path in folder.glob("*.onnx*")) == ["model.onnx", "model.onnx.data", "prefill.onnx"]
    graph = onnx.load(folder / "prefill.onnx", load_external_data=False).graph
    made = {tensor.name: tensor for tensor in graph.initializer if place_of(tensor)[0] == "made-when-opened"}
    manifest = open_bundle(folder).manifest
    assert [graph.role for graph in manifest.graphs] == ["decoder", "prompt"]
    sizes = {matrix.name: matrix.rows * matrix.columns for matrix in manifest.graphs[1].made}
    assert sum(sizes.values()) == LAYER_WEIGHTS
    assert made.keys() == sizes.keys() | {f"{each}_scales" for each in sizes}
    assert {made[each].data_type for each in sizes} == {onnx.TensorProto.INT8}
    assert {each: int(np.prod(made[each].dims)) for each in sizes} == sizes
    shared = places(folder / "prefill.onnx") - {("made-when-opened", "0")}
    assert shared < places(folder / "model.onnx")
    assert len(shared) >= N_LAYER * 6 + 4  # biases and norms of the layers, the last norm, embedding and head
    assert (folder / "prefill.onnx").stat().st_size < 60_000


@pytest.mark.parametrize("name", ["int8-blocks", "int4"])
def test_its_weights_are_the_decoders_rounded_to_bytes(bundles: dict[str, Path], name: str) -> None:
    """The oracle is a product of the decoder's node, as ONNX Runtime computes it, with each column of the identity."""
    folder = bundles[name]
    spec, compared = open_bundle(folder).manifest.graphs[1], 0
    for node in onnx.load(folder / "model.onnx").graph.node:
        matrix = next(
            (each for each in spec.made if node.op_type == "MatMulNBits" and each.name == rows_name(node)), None
        )
        if matrix is None:
            continue
        expected = product_with_identity(folder / "model.onnx", node, matrix.columns)
        bytes_, scales = read_whole_rows(folder, matrix)
        assert bytes_.shape == expected.shape == (matrix.columns, matrix.rows)
        assert np.array_equal(bytes_.min(axis=0), -128 * expected.any(axis=0))  # heads are padded with zeros
        assert (np.abs(bytes_ * scales - expected).max(axis=0) <= 1.5 * np.abs(scales)).all()  # 127 may stand for 128
        assert np.square(bytes_ * scales - expected).mean() < 0.1 * np.square(scales).mean()  # 1 / 12 of the nearest
        compared += 1
    assert compared == len(spec.made)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "most"), [("int8-blocks", 0.08), ("int8-blocks-of-16", 0.08), ("int4", 0.5), ("int4-gptq", 0.5)]
)
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


def test_matrices_too_small_for_the_file_of_weights_are_stored_in_the_graph(prompt: list[int], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", n_embd=16, n_head=2, n_positions=96)
    source = export_bundle(checkpoint, tmp_path / "float32").path
    quantization = Quantization(dtype="int8", max_perplexity_ratio=2.0)
    bundle = quantize_bundle(source, tmp_path / "int8", quantization).path
    assert len(open_bundle(bundle).manifest.graphs[1].made) < 4 * N_LAYER
    with ortgpt.load(source) as exact, ortgpt.load(bundle) as generator:
        expected, found = (
            each.engine.prefill(each.engine.new_cache(1, 64), [prompt], np.arange(64)[None])[0]
            for each in (exact, generator)
        )
    assert np.square(found - expected).mean() ** 0.5 < 0.08 * expected.std()


def test_a_prompt_and_the_steps_after_it_share_one_cache(bundles: dict[str, Path], prompt: list[int]) -> None:
    with ortgpt.load(bundles["int8-blocks"]) as generator:
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
    with ortgpt.load(bundles["int8-blocks"]) as generator:
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
    with ortgpt.load(bundles["int8-blocks"]) as generator:
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
    with ortgpt.load(bundles["int8-blocks"]) as generator:
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


@pytest.mark.parametrize(
    ("flavour", "values"), [("native", {"dtype": "int8", "method": "w8a8"}), ("portable", {"dtype": "int4"})]
)
def test_bundles_whose_one_graph_is_for_both_have_none(
    checkpoint: Path, tmp_path: Path, flavour: str, values: dict[str, Any]
) -> None:
    quantization = Quantization(max_perplexity_ratio=2.0, **values)
    dtype = values["dtype"]
    bundle = export_bundle(checkpoint, tmp_path / "out", flavour=flavour, dtype=dtype, quantization=quantization)
    assert [graph.role for graph in bundle.manifest.graphs] == ["decoder"]
    with pytest.raises(ortgpt.BundleError, match=r'has no graph for prompts beside its decoder.*prefill = "fast"'):
        ortgpt.load(bundle.path, prefill="fast")
    ortgpt.load(bundle.path, prefill="exact").close()


def test_a_caller_chooses_how_prompts_are_computed(bundles: dict[str, Path], prompt: list[int]) -> None:
    found = {}
    for prefill in ("auto", "fast", "exact"):
        with ortgpt.load(bundles["int4"], prefill=prefill) as generator:
            assert (generator.engine.prefill_graph is None) == (prefill == "exact")
            found[prefill] = generator.engine.prefill(generator.engine.new_cache(1, 64), [prompt])
            again = pickle.loads(pickle.dumps(generator))
            assert (again.engine.prefill_graph is None) == (prefill == "exact")
    assert np.array_equal(found["auto"], found["fast"])
    assert not np.array_equal(found["auto"], found["exact"])
    with pytest.raises(ortgpt.OptionError, match=r"^prefill = 'slow' \(accepted: auto, exact, fast\)$"):
        ortgpt.load(bundles["int4"], prefill="slow")


def test_the_command_line_chooses_it(bundles: dict[str, Path]) -> None:
    command, text = ["score", str(bundles["int4"])], "It is a truth universally acknowledged, " * 2
    fast, exact, default = (
        CliRunner().invoke(main, [*command, *more], input=text)
        for more in (["--prefill", "fast"], ["--prefill", "exact"], [])
    )
    assert fast.exit_code == exact.exit_code == 0, fast.output
    assert fast.stdout == default.stdout != exact.stdout


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"integers": 2**40}, "model.onnx.data ends before the weights of h.0.attn.c_attn.weight.rows"),
        ({"rows": 2**20}, "model.onnx.data ends before the weights of h.0.attn.c_attn.weight.rows"),
        ({"bits": 3}, r"in blocks of 32, 3 bits each \(accepted: 4 or 8 bits"),
        ({"block_size": 0}, r"in blocks of 0, 4 bits each \(accepted: 4 or 8 bits"),
        ({"file": "../secret"}, r"prefill.onnx is made of '../secret', which is not in the manifest"),
        ({"name": "other"}, "prefill.onnx"),
        ({"columns": 64}, "prefill.onnx"),
    ],
)
def test_a_manifest_that_describes_other_weights_is_refused(
    bundles: dict[str, Path], prompt: list[int], tmp_path: Path, change: dict[str, Any], fault: str
) -> None:
    folder = shutil.copytree(bundles["int4"], tmp_path / "bundle")
    bundle = open_bundle(folder)
    decoder, graph = bundle.manifest.graphs
    made = (replace(graph.made[0], **change), *graph.made[1:])
    manifest = replace(bundle.manifest, graphs=(decoder, replace(graph, made=made)))
    (folder / "ortgpt.json").write_text(manifest.to_json(), encoding="utf-8")
    with ortgpt.load(folder) as generator:
        with pytest.raises(ortgpt.BundleError, match=fault):
            generator.generate(prompt, max_new_tokens=1)
        assert len(generator.generate(prompt[:8], max_new_tokens=1).token_ids) == 1


@pytest.mark.parametrize("name", ["int8-blocks", "int4"])
def test_weights_that_have_several_views_are_counted_once(bundles: dict[str, Path], name: str) -> None:
    folder = bundles[name]
    inline = sum(
        len(tensor.raw_data) for tensor in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    )
    assert weight_bytes(ir.load(folder / "model.onnx")) == (folder / "model.onnx.data").stat().st_size + inline
