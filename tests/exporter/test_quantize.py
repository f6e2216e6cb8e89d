"""Quantised bundles: their files, their evidence, and that one with too large a loss is not written."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import ortgpt
from ortgpt import OptionError
from ortgpt.bundle.folder import Bundle, open_bundle, sha256_of
from ortgpt.engine.engine import Engine
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt_exporter import ExportError, export_bundle, quantize_bundle
from ortgpt_exporter.checkpoint.load import find_folder
from ortgpt_exporter.evaluation.batch_effects import measure_batch_effects
from ortgpt_exporter.evaluation.divergence import compare
from ortgpt_exporter.evaluation.sample import sample_rows, split_rows
from ortgpt_exporter.judges import calibration_for
from ortgpt_exporter.quantization.blocks import quantize_blocks
from ortgpt_exporter.quantization.gptq import quantize_gptq
from ortgpt_exporter.quantization.request import Quantization
from ortgpt_exporter.quantization.rewrite_graph import RoundedMatrices
from ortgpt_exporter.quantization.write import open_quantized, write_quantized
from ortgpt_exporter.quantize import recipe_for
from ortgpt_models import load_gpt, save_gpt
from outliers import inject
from support import TEXT, reseal, write_checkpoint

FLAVOURS = ("native", "portable")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for blocks of 32, heads of 12."""
    return write_checkpoint(tmp_path_factory.mktemp("quantised") / "checkpoint", n_embd=96, n_head=8)


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Path:
    return export_bundle(checkpoint, checkpoint.parent / "float32").path


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Path:
    path = checkpoint.parent / "text.txt"
    path.write_text(TEXT * 3, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundles(source: Path, text: Path) -> dict[str, Path]:
    return {
        dtype: quantize_bundle(
            source, source.parent / dtype, Quantization(dtype=dtype, eval_text=text, max_perplexity_ratio=2.0)
        ).path
        for dtype in ("int8", "int4")
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int4", 4)])
def test_every_matrix_is_quantised_and_the_embedding_is_stored_once(
    bundles: dict[str, Path], dtype: str, bits: int
) -> None:
    model = onnx.load(bundles[dtype] / "model.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 2 * 4 + 4
    assert kinds.count("GatherBlockQuantized") == 2
    assert not {"MatMul", "FusedMatMul", "Gemm"} & set(kinds)
    assert [node.input[1] for node in model.graph.node if node.op_type == "Gather"] == ["logit_rows"]
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert len(stored[f"wte.weight.int{bits}"].raw_data) == 300 * 96 * bits // 8
    # The head reads the same bytes of the file, in four parts.
    graph = onnx.load(bundles[dtype] / "model.onnx", load_external_data=False).graph
    places = {tensor.name: {each.key: each.value for each in tensor.external_data} for tensor in graph.initializer}
    look_up = next(node for node in graph.node if "input_ids" in node.input)
    head = [node for node in graph.node if node.op_type == "MatMulNBits" and node.input[1].startswith("wte")]
    for stored_name, read in zip(look_up.input[::2], zip(*(node.input[1:] for node in head), strict=True), strict=True):
        begin, length = (int(places[stored_name][key]) for key in ("offset", "length"))
        for name in read:
            assert int(places[name]["offset"]) == begin
            begin += int(places[name]["length"])
            length -= int(places[name]["length"])
        assert length == 0
    assert not [name for name, tensor in stored.items() if tensor.data_type == 1 and len(tensor.dims) == 2
                and not name.endswith("scales")]  # fmt: skip
    levels = {a.i for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"}
    assert levels == {4}


@torch.no_grad()
def test_the_evidence_is_what_pytorch_and_the_bundles_say(
    checkpoint: Path, bundles: dict[str, Path], text: Path
) -> None:
    gpt = load_gpt(checkpoint)
    for dtype, most in (("int8", 1.01), ("int4", 1.3)):
        evidence = open_bundle(bundles[dtype]).manifest.evidence
        assert evidence is not None
        with ortgpt.load(bundles[dtype]) as generator:
            ids = generator.tokenizer.encode(text.read_text(encoding="utf-8"))
            rows = split_rows(ids, generator.start_id, 64)
            logits = [generator.engine.prefill(generator.engine.new_cache(1, 64), [r], np.arange(len(r))[None])[0]
                      for r in rows]  # fmt: skip
        nll, baseline, kl, same = 0.0, 0.0, 0.0, 0
        for row, found in zip(rows, logits, strict=True):
            expected = torch.log_softmax(gpt(torch.tensor([row]))[0, :-1].double(), -1)
            other = torch.log_softmax(torch.from_numpy(found[:-1]).double(), -1)
            targets = torch.tensor(row[1:])[:, None]
            baseline -= float(expected.gather(1, targets).sum())
            nll -= float(other.gather(1, targets).sum())
            kl += float((expected.exp() * (expected - other)).sum())
            same += int((expected.argmax(1) == other.argmax(1)).sum())
        count = len(ids)
        assert (evidence.text, evidence.tokens) == ("text.txt", count)
        assert evidence.baseline_perplexity == pytest.approx(math.exp(baseline / count), rel=1e-4)
        # A kernel may round a row of a piece otherwise than a row of the whole.
        assert evidence.perplexity == pytest.approx(math.exp(nll / count), rel=2e-3)
        assert evidence.kl == pytest.approx(kl / count, rel=0.1)
        assert evidence.top1 == pytest.approx(same / count, abs=0.02)
        assert 0 < evidence.kl < 0.3
        assert 1 / 1.05 < evidence.perplexity_ratio < most
        size_bytes = len(text.read_bytes())
        assert evidence.bits_per_byte == pytest.approx(math.log2(evidence.perplexity) * count / size_bytes, rel=1e-4)
        assert 0.5 < evidence.top5 <= 1
        assert evidence.bytes_per_parameter < {"int8": 1.4, "int4": 0.95}[dtype]
        assert evidence.matrices == ({"int8": 10} if dtype == "int8" else {"int4": 9, "int8": 1})
        assert evidence.left_out == {}
        assert min(evidence.decode_tokens_per_s, evidence.baseline_prefill_tokens_per_s) > 0


def test_a_graph_is_like_itself(source: Path) -> None:
    with ortgpt.load(source) as generator:
        rows = [list(range(1, 40)), list(range(100, 130))]
        found = compare(generator.engine, generator.engine, rows)
        assert (found.kl, found.top1, found.top5, found.perplexity_ratio) == (0, 1, 1, 1)
        assert found.tokens == 67
        effects = measure_batch_effects(generator.engine, rows, "bounded")
        changes = (
            effects.argmax_changes_in_batch, effects.argmax_changes_beside_outliers,
            effects.argmax_changes_in_prefill, effects.argmax_changes_in_steps_of_four,
        )  # fmt: skip
        assert changes == (0, 0, 0, 0)
        assert effects.kind == "bounded"
        assert effects.logit_bound is not None
        assert effects.logit_bound < 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_not_accepted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def spoiled(bundle: Bundle, folder: Path) -> Engine:
        engine = open_quantized(bundle, folder)
        prefill = engine.prefill

        def spoil(*arguments: Any) -> Any:
            logits = prefill(*arguments).copy()
            logits[0, 0, 3] = value
            return logits

        monkeypatch.setattr(engine, "prefill", spoil)
        return engine

    monkeypatch.setattr("ortgpt_exporter.judges.open_quantized", spoiled)
    reason = r"the int8 bundle loses too much accuracy: perplexity ratio nan \(accepted: 1\.01\), KL nan .*; try "
    with pytest.raises(ExportError, match=reason):
        quantize_bundle(source, tmp_path / "out", Quantization(dtype="int8"))
    assert names(tmp_path) == []


def test_the_manifest_says_how_and_what_is_promised(bundles: dict[str, Path], source: Path) -> None:
    before = open_bundle(source).manifest
    manifest = open_bundle(bundles["int4"]).manifest
    assert manifest.source == before.source
    assert (manifest.precision.dtype, manifest.precision.recipe) == ("int4", "weight-blocks")
    assert manifest.precision.parameters == {
        "method": "scale-search", "block_size": 32, "head_block_size": 32, "head_dtype": "int4", "wider": [],
    }  # fmt: skip
    assert manifest.precision.promise.kind == "bounded"
    assert 0 < (manifest.precision.promise.logit_bound or 0) < 1
    assert manifest.precision.promise.argmax_changes_in_batch is not None
    assert manifest.precision.promise.argmax_changes_in_steps_of_four is not None
    assert manifest.verification == ()


def test_smaller_blocks_and_a_wider_head(source: Path, text: Path, tmp_path: Path) -> None:
    quantization = Quantization(
        dtype="int4", block_size=16, head_dtype="int8", eval_text=text, max_perplexity_ratio=1.5
    )
    bundle = quantize_bundle(source, tmp_path / "out", quantization)
    parameters = bundle.manifest.precision.parameters
    assert (parameters["method"], parameters["block_size"], parameters["head_dtype"]) == ("scale-search", 16, "int8")
    assert bundle.manifest.evidence is not None
    assert bundle.manifest.evidence.matrices == {"int4": 8, "int8": 2}
    assert bundle.manifest.evidence.kl < 0.1


def test_gptq_reads_a_text_and_loses_less(source: Path, bundles: dict[str, Path], text: Path, tmp_path: Path) -> None:
    quantization = Quantization(dtype="int4", method="gptq", calibration=text, eval_text=text, max_perplexity_ratio=2.0)
    manifest = quantize_bundle(source, tmp_path / "out", quantization).manifest
    plain = open_bundle(bundles["int4"]).manifest
    assert manifest.evidence is not None
    assert plain.evidence is not None
    assert manifest.evidence.kl < 0.8 * plain.evidence.kl
    with ortgpt.load(source) as generator:
        tokens = len(generator.tokenizer.encode(text.read_text(encoding="utf-8")))
    gptq = {"method": "gptq", "calibration": {"text": "text.txt", "tokens": tokens}}
    assert manifest.precision.parameters == {**plain.precision.parameters, **gptq}
    assert names(tmp_path) == ["out"]


def test_rows_of_w8a8_stay_the_same_beside_any_other(source: Path, text: Path, tmp_path: Path) -> None:
    quantization = Quantization(dtype="int8", method="w8a8", eval_text=text, max_perplexity_ratio=2.0)
    bundle = quantize_bundle(source, tmp_path / "out", quantization)
    precision = bundle.manifest.precision
    assert (precision.recipe, precision.parameters) == (
        "w8a8-rows", {"method": "w8a8", "head_block_size": 32, "head_dtype": "int8"},
    )  # fmt: skip
    assert precision.promise.argmax_changes_in_batch == precision.promise.argmax_changes_beside_outliers == 0
    kinds = [node.op_type for node in onnx.load(bundle.path / "model.onnx").graph.node]
    assert (kinds.count("MatMulIntegerToFloat"), kinds.count("MatMulNBits"), kinds.count("QuantizeLinear")) == (8, 4, 8)
    assert bundle.manifest.evidence is not None
    assert bundle.manifest.evidence.kl < 0.02


@pytest.mark.parametrize(
    ("dtype", "recipe", "matrices"),
    [("int8", "w8a8-rows", {"int8": 10}), ("int4", "weight-blocks", {"int8": 2, "int4": 9})],
)
def test_portable_bundles_are_quantised_in_standard_operators(
    dtype: str, recipe: str, matrices: dict[str, int], checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    quantization = Quantization(dtype=dtype, eval_text=text, max_perplexity_ratio=2.0)
    bundle = export_bundle(checkpoint, tmp_path / "out", flavour="portable", dtype=dtype, quantization=quantization)
    model = onnx.load(bundle.path / "model.onnx")
    assert {node.domain for node in model.graph.node} == {""}
    assert [opset.version for opset in model.opset_import if opset.domain == ""] == [21]
    assert bundle.manifest.precision.recipe == recipe
    evidence = bundle.manifest.evidence
    assert evidence is not None
    assert (evidence.matrices, set(evidence.left_out.values())) == (matrices, {"multiplies two activations"})
    assert len(evidence.left_out) == 2 * 2  # queries by keys and weights by values, a layer
    assert evidence.kl < {"int8": 0.02, "int4": 0.3}[dtype]
    assert {"tokenizer.json", "genai_config.json", "tokenizer_config.json"} <= set(names(bundle.path))
    gpt = load_gpt(checkpoint)
    with ortgpt.load(bundle.path) as generator, torch.no_grad():
        ids = generator.tokenizer.encode(TEXT)[:60]
        found = generator.engine.prefill(generator.engine.new_cache(1, 64), [ids], np.arange(60)[None])[0]
        expected = torch.log_softmax(gpt(torch.tensor([ids]))[0].double(), -1)
        kl = (expected.exp() * (expected - torch.log_softmax(torch.from_numpy(found).double(), -1))).sum(1).mean()
    assert float(kl) < {"int8": 0.02, "int4": 0.3}[dtype]


def test_optimums_recipe_needs_its_extra_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optimum", None)
    monkeypatch.setitem(sys.modules, "optimum.onnxruntime", None)
    source = export_bundle(checkpoint, tmp_path / "portable", flavour="portable").path
    with pytest.raises(ModuleNotFoundError, match="optimum"):
        quantize_bundle(source, tmp_path / "out", Quantization(dtype="int8", method="dynamic-avx512-vnni"))
    assert names(tmp_path) == ["portable"]


def test_a_batch_dependent_bundle_says_so_when_it_is_loaded(
    bundles: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(bundles["int8"], tmp_path / "copy"))
    manifest = open_bundle(folder).manifest
    promise = replace(manifest.precision.promise, kind="batch_dependent")
    manifest = replace(manifest, precision=replace(manifest.precision, promise=promise))
    (folder / "ortgpt.json").write_text(manifest.to_json())
    ortgpt.load(bundles["int8"]).close()
    assert caplog.text == ""
    ortgpt.load(folder).close()
    assert "is batch_dependent: a row's answer changes with the other rows of its batch" in caplog.text


@pytest.mark.parametrize("n_embd", [48, 80])
def test_widths_that_no_32_divides(n_embd: int, tmp_path: Path) -> None:
    source = export_bundle(write_checkpoint(tmp_path / "checkpoint", n_embd=n_embd), tmp_path / "float32").path
    quantization = Quantization(dtype="int8", method="w8a8", max_perplexity_ratio=2.0)
    manifest = quantize_bundle(source, tmp_path / "out", quantization).manifest
    assert manifest.precision.parameters["head_block_size"] == 16


def test_a_short_text_to_measure_on_makes_no_empty_promise(source: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:300], encoding="utf-8")
    quantization = Quantization(dtype="int4", eval_text=short, max_perplexity_ratio=9.0)
    promise = quantize_bundle(source, tmp_path / "out", quantization).manifest.precision.promise
    assert (promise.logit_bound or 0) > 1e-3


def test_line_ends_of_a_text_are_not_changed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "crlf.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    quantization = Quantization(dtype="int8", eval_text=str(tmp_path / "crlf.txt"), max_perplexity_ratio=2.0)
    evidence = quantize_bundle(source, tmp_path / "out", quantization).manifest.evidence
    assert evidence is not None
    with ortgpt.load(source) as generator:
        assert evidence.tokens == len(generator.tokenizer.encode(TEXT.replace("\n", "\r\n")))


def test_a_bundle_is_not_written_into_or_over_its_source(source: Path) -> None:
    before = names(source)
    for out, force in ((source, True), (source / "deep" / "x.onnx", False)):
        with pytest.raises(FileExistsError, match="lies in the bundle that it would be made from"):
            quantize_bundle(source, out, Quantization(dtype="int8"), force=force)
    assert names(source) == before


def test_a_certain_model_is_quantised(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "certain", n_layer=1, n_embd=64)
    gpt = load_gpt(folder)
    with torch.no_grad():
        gpt.wte.weight.data = gpt.wte.weight * 300
    save_gpt(gpt, folder)
    source = export_bundle(folder, tmp_path / "float32").path
    evidence = quantize_bundle(source, tmp_path / "out", Quantization(dtype="int8")).manifest.evidence
    assert evidence is not None
    assert evidence.baseline_bits_per_byte is not None
    assert evidence.baseline_bits_per_byte < 1e-3


def test_a_bad_choice_is_named_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    for quantization, reason in (
        (Quantization(dtype="int4", method="gptq"), "needs a calibration text"),
        (Quantization(dtype="int4", method="w8a8"), "method = 'w8a8'"),
        (Quantization(dtype="int4", eval_text=tmp_path / "none"), "none"),
    ):
        with pytest.raises((ExportError, FileNotFoundError), match=reason):
            export_bundle(tmp_path / "no-checkpoint", tmp_path / "out", dtype="int4", quantization=quantization)


def test_a_gate_that_fails_widens_matrices_and_then_writes_nothing(source: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    reason = r"loses too much accuracy: .*\(accepted: 1e-09\).* with 4 matrices in 8 bits; try .* or a larger max_"
    with pytest.raises(ExportError, match=reason):
        quantize_bundle(source, tmp_path / "deep" / "out", Quantization(dtype="int4", eval_text=text, max_kl=1e-9))
    assert names(tmp_path / "deep") == []
    loose = quantize_bundle(
        source, tmp_path / "loose", Quantization(dtype="int4", eval_text=text, max_perplexity_ratio=2)
    ).manifest.evidence
    assert loose is not None
    quantization = Quantization(dtype="int4", eval_text=text, max_perplexity_ratio=2, max_kl=0.97 * loose.kl)
    mixed = quantize_bundle(source, tmp_path / "mixed", quantization).manifest
    assert mixed.evidence is not None
    assert mixed.evidence.kl <= 0.97 * loose.kl
    assert len(mixed.precision.parameters["wider"]) in (2, 4)
    assert mixed.evidence.matrices["int8"] == 1 + len(mixed.precision.parameters["wider"])


def spy_on_rounding(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Record the bits and the matrix of each rounding."""
    calls: list[tuple[int, Any]] = []
    for name, real in (("quantize_blocks", quantize_blocks), ("quantize_gptq", quantize_gptq)):

        def spy(matrix: Any, *args: Any, real: Any = real, bits: int, **keywords: Any) -> Any:
            calls.append((bits, matrix.copy()))
            return real(matrix, *args, bits=bits, **keywords)

        monkeypatch.setattr(f"ortgpt_exporter.quantization.rewrite_graph.{name}", spy)
    return calls


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("method", ["scale-search", "gptq"])
def test_a_retry_rounds_only_the_matrices_that_it_widens(
    flavour: str, method: str, checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_bundle(export_bundle(checkpoint, tmp_path / "float32", flavour=flavour).path)
    quantization = Quantization(dtype="int4", method=method, calibration=text if method == "gptq" else None)
    plain = recipe_for(source, quantization)
    wide = replace(plain, wider=("h.0.attn.c_attn.weight", "h.1.mlp.c_proj.weight"))
    calibration = calibration_for(source, plain, ByteLevelBPE.load(source.path), quantization)
    folders = {name: tmp_path / name for name in ("retry", "fresh")}
    for folder in folders.values():
        folder.mkdir()
    calls = spy_on_rounding(monkeypatch)
    matrices: RoundedMatrices = {}
    write_quantized(source, folders["retry"], plain, calibration=calibration, rounded=matrices)
    first = len(calls)
    assert (
        first == {"native": 10, "portable": 11}[flavour]
    )  # of the portable embedding the look-up has bytes of its own
    report = write_quantized(source, folders["retry"], wide, calibration=calibration, rounded=matrices)
    assert [bits for bits, _ in calls[first:]] == [8, 8]
    shapes = [matrix.shape for _, matrix in calls[first:]]
    assert shapes == [({"native": 384, "portable": 288}[flavour], 96), (96, 384)]  # native heads are padded to 16
    del calls[:]
    fresh = write_quantized(source, folders["fresh"], wide, calibration=calibration)
    assert len(calls) == first
    assert report == fresh
    assert names(folders["retry"]) == names(folders["fresh"])
    for name in names(folders["fresh"]):
        assert (folders["retry"] / name).read_bytes() == (folders["fresh"] / name).read_bytes(), name


def test_matrices_that_wait_for_a_retry_are_packed(source: Path, tmp_path: Path) -> None:
    bundle = open_bundle(source)
    matrices: RoundedMatrices = {}
    write_quantized(bundle, tmp_path, recipe_for(bundle, Quantization(dtype="int4")), rounded=matrices)
    weights = sum(matrix.blocks.integers.size for matrix in matrices.values())
    size_bytes = sum(matrix.blocks.packed.nbytes + matrix.blocks.scales.nbytes for matrix in matrices.values())
    assert size_bytes < 0.7 * weights  # half a byte, an eighth for the scale of 32, and the positions in bytes


def test_the_retry_is_measured_on_the_same_rows_which_are_drawn_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    measured: list[Any] = []

    def draw(engine: Any, start_id: int) -> Any:
        drawn.append(sample_rows(engine, start_id))
        return drawn[-1]

    def spy(baseline: Any, candidate: Any, rows: Any, **keywords: Any) -> Any:
        measured.append(rows)
        return compare(baseline, candidate, rows, **keywords)

    monkeypatch.setattr("ortgpt_exporter.texts.sample_rows", draw)
    monkeypatch.setattr("ortgpt_exporter.judges.compare", spy)
    with pytest.raises(ExportError, match="with 4 matrices in 8 bits"):
        quantize_bundle(source, tmp_path / "out", Quantization(dtype="int4", max_kl=1e-9))
    assert len(drawn) == 1
    assert measured == drawn * 3


def test_an_export_hashes_its_float32_bundle_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    hashed: list[str] = []

    def spy_open(path: Any) -> Any:
        opened.append(str(path))
        return open_bundle(path)

    def spy_hash(path: Path) -> str:
        hashed.append(str(path))
        return sha256_of(path)

    for module in ("ortgpt.opening", "ortgpt_exporter.export", "ortgpt_exporter.quantize"):
        monkeypatch.setattr(f"{module}.open_bundle", spy_open)
    monkeypatch.setattr("ortgpt.bundle.folder.sha256_of", spy_hash)
    quantization = Quantization(dtype="int8", max_perplexity_ratio=2.0)
    bundle = export_bundle(checkpoint, tmp_path / "out", dtype="int8", quantization=quantization)
    assert len(opened) == 3  # the float32 bundle when it is written and when it is quantised, and the quantised one
    assert len([path for path in hashed if path.endswith("model.onnx.data")]) == 2
    assert len(hashed) == len(set(hashed))
    assert bundle == open_bundle(tmp_path / "out")


@pytest.mark.parametrize("dtype", [None, "float32", "int4"])
def test_a_quantisation_of_another_dtype_is_refused(dtype: str | None, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"quantization\.dtype = 'int8'"):
        export_bundle(checkpoint, tmp_path / "out", dtype=dtype, quantization=Quantization(dtype="int8"))
    assert names(tmp_path) == []


def test_export_goes_by_way_of_float32_and_leaves_nothing_of_it(checkpoint: Path, tmp_path: Path) -> None:
    quantization = Quantization(dtype="int8", max_perplexity_ratio=1.5)
    bundle = export_bundle(checkpoint, tmp_path / "new" / "out", dtype="int8", quantization=quantization)
    assert names(tmp_path / "new") == ["out"]
    assert names(bundle.path) == [
        "config.json", "generation_config.json", "merges.txt", "model.onnx", "model.onnx.data", "ortgpt.json",
        "prefill.onnx", "vocab.json",
    ]  # fmt: skip
    assert bundle.manifest.evidence is not None
    assert bundle.manifest.evidence.text == "drawn from the float32 model"
    assert bundle.manifest.evidence.tokens == 16 * 63
    with ortgpt.load(bundle.path) as generator:
        assert len(generator.generate_batch(["It is", "a truth"], max_new_tokens=8, seed=1)) == 2


def test_bad_input_gets_one_line_and_leaves_no_file(
    checkpoint: Path, source: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    short = tmp_path / "short.txt"
    short.write_text("It is a truth", encoding="utf-8")

    def gptq(path: Path) -> dict[str, Any]:
        return {"method": "gptq", "calibration": path}

    narrow = export_bundle(write_checkpoint(tmp_path / "narrow", n_embd=40), tmp_path / "narrow-bundle").path
    cases: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (source, {"dtype": "int3"}, OptionError, r"dtype = 'int3' \(accepted: int8, int4\)"),
        (
            source,
            {"dtype": "int4", "method": "magic"},
            ExportError,
            "method = 'magic' .*accepted: scale-search, gptq\\)",
        ),
        (source, {"dtype": "int4", "block_size": 128}, ExportError, r"block_size = 128 \(accepted here: 32, 16\)"),
        (source, {"dtype": "int4", "head_dtype": "float16"}, OptionError, "head_dtype = 'float16'"),
        (source, {"dtype": "int8", "max_perplexity_ratio": 0.5}, OptionError, "max_perplexity_ratio = 0.5 .*above 1"),
        (source, {"dtype": "int8", "max_kl": 0.0}, OptionError, "max_kl = 0.0 .*above 0"),
        (
            source,
            {"dtype": "int8", "eval_text": empty},
            ExportError,
            r"empty.txt has 0 tokens \(accepted: 128 or more\)",
        ),
        (source, {"dtype": "int8", "eval_text": tmp_path / "latin.txt"}, ExportError, "latin.txt is not UTF-8"),
        (source, {"dtype": "int8", "eval_text": tmp_path / "none"}, FileNotFoundError, "none"),
        (bundles["int8"], {"dtype": "int4"}, ExportError, r"is int8 \(accepted: float32\)"),
        (
            source,
            {"dtype": "int4", "method": "w8a8"},
            ExportError,
            r"'w8a8' with native int4 \(accepted: scale-search,",
        ),
        (
            source,
            {"dtype": "int8", "method": "dynamic-avx2"},
            ExportError,
            r"with native int8 \(accepted: scale-search, gptq, w8a8\)",
        ),
        (source, {"dtype": "int8", "method": "w8a8", "block_size": 32}, ExportError, "block_size would have no effect"),
        (
            source,
            {"dtype": "int4", "calibration": empty},
            ExportError,
            r"would have no effect \(accepted with .* gptq\)",
        ),
        (source, {"dtype": "int4", "method": "gptq"}, ExportError, "the method gptq needs a calibration text"),
        (
            source,
            {"dtype": "int4", **gptq(empty)},
            ExportError,
            r"empty.txt has 0 tokens \(accepted: 32 or more",
        ),
        (source, {"dtype": "int4", **gptq(short)}, ExportError, r"short.txt has \d+ tokens \(accepted: 32 or more"),
        (source, {"dtype": "int4", **gptq(tmp_path / "latin.txt")}, ExportError, "latin.txt is not UTF-8"),
        (source, {"dtype": "int4", **gptq(tmp_path / "none")}, FileNotFoundError, "none"),
        (narrow, {"dtype": "int8", "block_size": 64}, ExportError, r"block_size = 64 \(accepted here: 32, 16\)"),
        (checkpoint, {"dtype": "int8"}, FileNotFoundError, "holds no ortgpt.json"),
        (source, {"dtype": []}, OptionError, r"dtype = \[\]"),
        (
            source,
            {"dtype": "int4", "calibration": 5},
            OptionError,
            r"calibration = 5 \(accepted: the path of a UTF-8 text",
        ),
        (source, {"dtype": "int8", "block_size": 16.0}, OptionError, r"block_size = 16\.0 \(accepted: 128, 64"),
        (source, {"dtype": "int8", "head_dtype": []}, OptionError, r"head_dtype = \[\]"),
        (source, {"dtype": "int8", "max_kl": True}, OptionError, "max_kl = True"),
        (source, {"dtype": "int8", "max_perplexity_ratio": "1.1"}, OptionError, r"max_perplexity_ratio = '1\.1'"),
    ]
    for bundle, choices, error, reason in cases:
        with pytest.raises(error, match=reason) as caught:
            quantize_bundle(bundle, tmp_path / "out", Quantization(**choices))
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["empty.txt", "latin.txt", "narrow", "narrow-bundle", "short.txt"]


def test_a_changed_evidence_is_noticed(bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundles["int8"], tmp_path / "copy"))
    values = json.loads((folder / "ortgpt.json").read_text())
    values["evidence"]["perplexity"] = 1.0
    (folder / "ortgpt.json").write_text(json.dumps(values))
    with pytest.raises(ortgpt.BundleError, match="sha256"):
        open_bundle(folder)
    for bad, reason in (
        ({"baseline_perplexity": 0.0}, r"evidence\.baseline_perplexity = 0\.0 \(accepted: a number above 0"),
        ({"kl": 10**400}, r"evidence\.kl = 10+\.\.\. \(accepted: a number\)"),
        ({"matrices": {"int8": "all"}}, r"evidence\.matrices\['int8'\] = 'all' \(accepted: an integer"),
    ):
        (folder / "ortgpt.json").write_text(json.dumps(values | {"evidence": values["evidence"] | bad}))
        with pytest.raises(ortgpt.BundleError, match=reason):
            open_bundle(folder)
    (folder / "ortgpt.json").write_text(json.dumps(values | {"evidence": "x"}))
    with pytest.raises(ortgpt.BundleError, match=r"evidence = 'x' \(accepted: an object or null\)$"):
        open_bundle(folder)
    values["evidence"]["tokens"] = "many"
    del values["evidence"]["kl"]
    (folder / "ortgpt.json").write_text(json.dumps(values))
    with pytest.raises(ortgpt.BundleError, match=r"evidence\.tokens = 'many'.*evidence\.kl = None"):
        open_bundle(folder)


# Each with the largest accepted perplexity ratio and KL divergence in nats.
ON_OUTLIERS: list[tuple[str, Quantization, float, float]] = [
    ("native", Quantization(dtype="int8"), 1.005, 0.002),
    ("native", Quantization(dtype="int8", method="w8a8"), 1.005, 0.002),
    ("native", Quantization(dtype="int4"), 1.04, 0.03),
    ("portable", Quantization(dtype="int8"), 1.005, 0.002),
    ("portable", Quantization(dtype="int4"), 1.04, 0.03),
]


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_models_with_outliers_lose_no_more_than_others(kind: str, tmp_path: Path) -> None:
    """On the bundled model with 4 of its 256 channels 64 times larger; the float32 function is the same."""
    odd = write_odd(tmp_path / "odd", kind)
    sources = {flavour: export_bundle(odd, tmp_path / flavour, flavour=flavour).path for flavour in FLAVOURS}
    for place, (flavour, quantization, most, most_kl) in enumerate(ON_OUTLIERS):
        evidence = quantize_bundle(sources[flavour], tmp_path / str(place), quantization).manifest.evidence
        assert evidence is not None
        assert 0.99 < evidence.perplexity_ratio < most
        assert evidence.kl < most_kl


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("flavour", ["native", "portable"])
def test_gptq_survives_outliers_or_refuses(kind: str, flavour: str, text: Path, tmp_path: Path) -> None:
    source = export_bundle(write_odd(tmp_path / "odd", kind), tmp_path / "float32", flavour=flavour).path
    quantization = Quantization(dtype="int4", method="gptq", calibration=text)
    evidence = quantize_bundle(source, tmp_path / "out", quantization).manifest.evidence
    assert evidence is not None
    assert 0.99 < evidence.perplexity_ratio < 1.05


def write_odd(folder: Path, kind: str) -> Path:
    """Write the bundled model with outliers."""
    bundled = find_folder("austen")
    gpt = load_gpt(bundled)
    inject(gpt, kind)
    folder.mkdir()
    save_gpt(gpt, folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(bundled / name, folder / name)
    return folder


def test_weights_in_a_file_of_their_own_are_quantised_and_may_lie_so_again(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "wide", n_embd=128)  # wide enough for each bias to lie there
    source = export_bundle(checkpoint, tmp_path / "float32", flavour="portable", external_data=True).path
    assert "model.onnx.data" in names(source)
    quantization = Quantization(dtype="int8", max_perplexity_ratio=2)
    inside = quantize_bundle(source, tmp_path / "inside", quantization).path
    assert "model.onnx.data" not in names(inside)
    beside = quantize_bundle(source, tmp_path / "beside", quantization, external_data=True).path
    assert (beside / "model.onnx.data").stat().st_size > 3 * (beside / "model.onnx").stat().st_size
    shutil.rmtree(source)
    ids = []
    for path in (inside, beside):
        with ortgpt.load(path) as generator:
            ids.append(generator.generate("It is", max_new_tokens=20).token_ids)
    assert ids[0] == ids[1]


def test_damaged_or_foreign_graphs_are_named_before_any_work(
    source: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    model = (damaged / "model.onnx").read_bytes()
    (damaged / "model.onnx").write_bytes(b"\0" * 4000 + model[4000:])
    with pytest.raises(ortgpt.BundleError, match="sha256"):
        quantize_bundle(damaged, tmp_path / "out", Quantization(dtype="int8"))
    foreign = Path(shutil.copytree(source, tmp_path / "foreign"))
    shutil.copy(bundles["int8"] / "model.onnx", foreign)
    reseal(foreign)
    with pytest.raises(ExportError, match=r"has no float32 matrix h\.0\.attn\.c_attn\.weight \(10 are missing\)"):
        quantize_bundle(foreign, tmp_path / "out", Quantization(dtype="int8"))
    assert names(tmp_path) == ["damaged", "foreign"]


def test_a_failure_leaves_no_parent_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"loses too much accuracy: .*; try .*a larger max_"):
        quantize_bundle(source, tmp_path / "a" / "b" / "out", Quantization(dtype="int8", max_kl=1e-12))
    with pytest.raises(ExportError, match="does not exist"):
        export_bundle(tmp_path / "none", tmp_path / "c" / "d" / "out", dtype="int8")
    one = write_checkpoint(tmp_path / "one", n_positions=1, n_embd=64)
    with pytest.raises(ExportError, match="context of 1 token"):
        export_bundle(one, tmp_path / "e" / "out", dtype="int8")
    assert names(tmp_path) == ["one"]


def test_a_network_that_overflows_itself_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "large")
    gpt = load_gpt(folder)
    norm: Any = gpt.ln_f
    with torch.no_grad():
        norm.weight.data = norm.weight * 1e38
        gpt.wte.weight.data = gpt.wte.weight * 1e30
    save_gpt(gpt, folder)
    with pytest.raises(ExportError, match="logits are not finite in the network itself"):
        export_bundle(folder, tmp_path / "out")


def test_the_second_retry_keeps_what_the_first_one_widened(
    source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widened: list[set[str]] = []

    def noting(bundle: Any, folder: Path, recipe: Any, **options: Any) -> Any:
        widened.append(set(recipe.wider))
        return write_quantized(bundle, folder, recipe, **options)

    monkeypatch.setattr("ortgpt_exporter.quantize.write_quantized", noting)
    asked = Quantization(dtype="int4", eval_text=text, max_kl=1e-12)
    with pytest.raises(ExportError, match="matrices in 8 bits"):
        quantize_bundle(source, tmp_path / "out", asked)
    none, quarter, half = widened
    assert not none
    assert quarter < half
    assert (len(quarter), len(half)) == (2, 4)
