"""A bundle is written whole or not at all, and never in place of anything but a bundle."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Tokenizer

import ortgpt
from ortgpt import OptionError
from ortgpt.bundle.folder import open_bundle
from ortgpt.bundle.manifest import Promise
from ortgpt_exporter import ExportError, export_bundle
from ortgpt_exporter.graph.to_onnx import export_graph
from ortgpt_models import GPT, load_gpt
from ortgpt_models.presets import PRESETS
from ortgpt_models.progress import Progress
from support import greedy_ids, random_model, write_checkpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_progress_counts_every_step(small_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    bundle = export_bundle(small_checkpoint, tmp_path / "deep" / "out", on_progress=seen.append)
    assert [progress.done for progress in seen] == list(range(15))
    assert {progress.total for progress in seen[1:]} == {14}
    assert seen[0].activity == "loading the checkpoint"
    assert names(tmp_path / "deep") == ["out"]
    assert bundle.path == tmp_path / "deep" / "out"
    assert all(check.passed for check in bundle.manifest.verification)


@pytest.mark.parametrize("step", range(1, 15))
def test_an_interruption_at_any_step_leaves_nothing(small_checkpoint: Path, tmp_path: Path, step: int) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == step - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(small_checkpoint, tmp_path / "out", on_progress=interrupt)
    assert names(tmp_path) == []


def test_a_full_disk_leaves_nothing_and_says_so_in_one_line(small_checkpoint: Path, tmp_path: Path) -> None:
    limit = 200_000  # bytes a file may have; the model needs more
    code = (
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"from ortgpt.cli.main import main\n"
        f"main(['export', {str(small_checkpoint)!r}, '-o', {str(tmp_path / 'out')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert names(tmp_path) == []


def test_a_graph_that_fails_its_verification_is_not_written(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(gpt: GPT, flavour: str, dtype: str) -> Any:
        other = copy.deepcopy(gpt)
        other.get_parameter("h.1.mlp.c_fc.bias").data += 0.1
        return export_graph(other, flavour, dtype)

    monkeypatch.setattr("ortgpt_exporter.export.export_graph", wrong)
    with pytest.raises(
        ExportError, match=r"does not compute what PyTorch does: prefill of 1: values differ by .*accepted"
    ):
        export_bundle(small_checkpoint, tmp_path / "out")
    assert names(tmp_path) == []


def test_force_replaces_a_bundle_and_nothing_else(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_bundle(small_checkpoint, out)
    other = write_checkpoint(tmp_path / "other", seed=9)
    with pytest.raises(FileExistsError, match="already exists"):
        export_bundle(other, out)
    (out / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"also holds notes\.txt"):
        export_bundle(other, out, force=True)
    (out / "notes.txt").unlink()
    (out / "my.onnx.notes").mkdir()
    (out / "backup.onnx").touch()
    with pytest.raises(FileExistsError, match=r"also holds backup\.onnx, my\.onnx\.notes"):
        export_bundle(other, out, force=True)
    (out / "my.onnx.notes").rmdir()
    (out / "backup.onnx").unlink()
    monkeypatch.chdir(out)
    with pytest.raises(FileExistsError, match="is the current folder"):
        export_bundle(other, ".", force=True)
    monkeypatch.chdir(tmp_path)
    (out / "vocab.json").unlink()  # even a damaged bundle
    assert export_bundle(other, out, force=True).manifest.source.id == "other"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").touch()
    for target in (tmp_path / "home", tmp_path / "other"):
        with pytest.raises(FileExistsError, match="is not a bundle"):
            export_bundle(other, target, force=True)
    assert names(tmp_path / "home") == ["precious"]
    assert names(tmp_path) == ["home", "other", "out"]


def test_a_failed_export_keeps_the_old_bundle(small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = export_bundle(small_checkpoint, out).manifest

    def interrupt(progress: Progress) -> None:
        if progress.done == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_bundle(small_checkpoint, out, force=True, on_progress=interrupt)
    assert open_bundle(out).manifest == before
    assert names(tmp_path) == ["out"]


def test_rows_beyond_the_tokenizer_are_counted_and_never_generated(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "padded", vocab_size=320)
    bundle = export_bundle(folder, tmp_path / "out")
    assert bundle.manifest.masked_tokens == 20
    with ortgpt.load(bundle.path) as generator:
        rows = generator.generate_batch(["a", "b", "c"], max_new_tokens=40, temperature=5.0, top_k=0, seed=[1, 2, 3])
        assert max(max(row.token_ids) for row in rows) < 300
        with pytest.raises(ortgpt.PromptError, match="token id 300"):
            generator.generate([300])


@pytest.mark.parametrize(
    "config",
    [
        {"n_positions": 1},
        {"n_positions": 2},
        {"n_positions": 9, "n_layer": 1},
        {"n_embd": 35, "n_head": 7, "n_inner": 50},
        {"n_embd": 8, "n_head": 1, "activation_function": "relu"},
        {"activation_function": "silu", "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ],
)
def test_odd_shapes_export_and_generate_what_transformers_does(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "odd", seed=4, **config)
    shape = {"vocab_size": 300, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
    model = random_model(4, **(shape | config))
    with ortgpt.load(export_bundle(folder, tmp_path / "out").path) as generator:
        room = generator.engine.config.n_positions
        lengths, steps = sorted({1, min(2, room), min(17, room), room}), min(6, room - 1)
        assert [check.name for check in generator.bundle.manifest.verification] == [
            *(f"prefill of {length}" for length in lengths), "prefill in pieces", f"{steps} cached steps",
            f"ragged batch and {steps} steps", "hidden states of a ragged batch",
        ]  # fmt: skip
        for prompt in ([1], [7, 8, 9][:room]):
            new = min(20, room - len(prompt))
            if new:
                found = generator.generate(prompt, max_new_tokens=new, eos_token_id=[])
                assert found.token_ids == greedy_ids(model, prompt, new)


def test_bad_input_is_refused_before_anything_is_written(small_checkpoint: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "int3"}, r"dtype = 'int3' with native for cpu \(accepted: float32, float16, int8, int4\)"),
        ({"dtype": "float32", "target": "cuda"}, r"dtype = 'float32' with native for cuda \(accepted: float16\)"),
        (
            {"flavour": "portable", "target": "cuda"},
            r"flavour = 'portable' with target = 'cuda' \(accepted: native for",
        ),
        ({"target": "tpu"}, "flavour = 'native' with target = 'tpu'"),
    ]
    for keywords, reason in cases:
        with pytest.raises(OptionError, match=reason):
            export_bundle(small_checkpoint, tmp_path / "out", **keywords)
    for wrong in (None, 5, ["austen"]):
        with pytest.raises(OptionError, match=r"^name = .*\(accepted: a path, or a hub id\)"):
            export_bundle(wrong, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"quantization = 'int8' \(accepted: a Quantization\)"):
        export_bundle(small_checkpoint, tmp_path / "out", dtype="int8", quantization="int8")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="does not exist"):
        export_bundle(tmp_path / "none", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=r"no config\.json"):
        export_bundle(tmp_path / "empty", tmp_path / "out")
    assert names(tmp_path) == ["empty"]


@pytest.mark.parametrize("flavour", ["native", "portable"])
def test_large_weights_and_those_of_a_native_graph_get_a_file_of_their_own(
    flavour: str, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 4 * sum(parameter.numel() for parameter in load_gpt(small_checkpoint).parameters())
    if flavour == "portable":
        assert "model.onnx.data" not in names(export_bundle(small_checkpoint, tmp_path / "one", flavour=flavour).path)
        monkeypatch.setattr("ortgpt_exporter.graph.save.MAX_GRAPH_BYTES", weights // 2)
    bundle = export_bundle(small_checkpoint, tmp_path / "out", flavour=flavour)
    assert 0.98 * weights <= (bundle.path / "model.onnx.data").stat().st_size <= 1.2 * weights  # but short biases
    assert (bundle.path / "model.onnx").stat().st_size < 50_000
    assert {"model.onnx", "model.onnx.data"} <= bundle.manifest.files.keys()
    (bundle.path / "model.onnx.data").unlink()
    with pytest.raises(ortgpt.BundleError, match=r"model\.onnx\.data is missing"):
        ortgpt.load(bundle.path)


@pytest.mark.parametrize("keywords", [{}, {"flavour": "portable"}, {"external_data": True, "flavour": "portable"}])
def test_a_bundle_opens_from_anywhere_without_writing(
    keywords: dict[str, Any], small_checkpoint: Path, small: ortgpt.Generator, tmp_path: Path
) -> None:
    """From another working directory, by a link, from an odd name, after a move, and on a full disk."""
    want = small.generate("It is", max_new_tokens=5).token_ids
    places = tmp_path / "a  näme $HOME 'x'"
    export_bundle(small_checkpoint, tmp_path / "first", **keywords).path.rename(tmp_path / "moved")
    places.mkdir()
    shutil.copytree(tmp_path / "moved", places / "日本 bundle")
    (tmp_path / "link").symlink_to(places, target_is_directory=True)
    code = (
        "import resource, signal, sys, ortgpt\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "ids = ortgpt.load(sys.argv[1]).generate('It is', max_new_tokens=5).token_ids\n"
        "print(ids)"
    )
    for cwd, path in (
        ("/", tmp_path / "moved"),
        (tmp_path, "moved"),
        (tmp_path / "moved", "."),
        (places, "日本 bundle"),
        (tmp_path, "link/日本 bundle"),
    ):
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (f"{want}\n", "")


def test_float16_bundles_compute_in_float16_and_say_so(small_checkpoint: Path, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "cuda": {"target": "cuda"},
        "half": {"dtype": "float16"},
        "portable": {"dtype": "float16", "flavour": "portable"},
    }
    for name, keywords in cases.items():
        bundle = export_bundle(small_checkpoint, tmp_path / name, **keywords)
        graph = bundle.manifest.graphs[0]
        assert len(bundle.manifest.graphs) == (2 if name == "cuda" else 1)
        assert graph.cache is not None
        assert (graph.cache.dtype, bundle.manifest.precision.dtype) == ("float16", "float16")
        assert graph.target == ("cuda" if name == "cuda" else "cpu")
        assert bundle.manifest.precision.promise == Promise(kind="bounded", relative_logit_bound=2e-2)
        for check in bundle.manifest.verification:
            assert 1e-5 < check.max_abs_diff < check.tolerance
            assert check.tolerance == pytest.approx(2e-2 * max(1, check.max_abs_logit), rel=1e-5)
        with ortgpt.load(bundle.path, device="cpu") as generator:
            assert len(generator.generate_batch(["It is", "a truth universally"], max_new_tokens=9)) == 2


@pytest.mark.slow
def test_gpt2_xl_exports_and_verifies_within_20_gb(tmp_path: Path) -> None:
    xl = PRESETS["gpt2-xl"]
    shape: dict[str, Any] = {
        "n_positions": xl.n_positions,
        "n_embd": xl.n_embd,
        "n_layer": xl.n_layer,
        "n_head": xl.n_head,
    }
    write_checkpoint(tmp_path / "xl", vocab_size=xl.vocab_size, **shape)
    code = (
        "import resource, sys; from ortgpt_exporter import export_bundle\n"
        "bundle = export_bundle(sys.argv[1], sys.argv[2])\n"
        "print(len(bundle.manifest.verification), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "xl"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    checks, peak_kb = map(int, done.stdout.split())
    assert checks == 7
    assert peak_kb * 1024 < 20e9
    assert (tmp_path / "out" / "model.onnx.data").stat().st_size > 6.2e9


def test_the_checkpoints_generation_config_is_copied(small_checkpoint: Path, small_bundle: Path) -> None:
    ours = json.loads((small_bundle / "generation_config.json").read_text())
    theirs = json.loads((small_checkpoint / "generation_config.json").read_text())
    assert ours == theirs


def test_a_byte_order_mark_in_any_file_of_a_checkpoint_changes_nothing(small_checkpoint: Path, tmp_path: Path) -> None:
    """Windows tools write one; the bundle has none, for those who read it strictly."""
    GPT2Tokenizer.from_pretrained(small_checkpoint).save_pretrained(tmp_path / "tokenizer")
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    for folder, mark in ((plain, b""), (marked, b"\xef\xbb\xbf")):
        folder.mkdir()
        for path in [*small_checkpoint.iterdir(), *(tmp_path / "tokenizer").glob("tokenizer*.json")]:
            data = path.read_bytes()
            (folder / path.name).write_bytes(mark + data if path.suffix in (".json", ".txt") else data)
        (folder / "README.md").write_bytes(mark + b"---\nlicense: mit\n---\n")
    one, other = (
        export_bundle(folder, tmp_path / f"{folder.name}-out", flavour="portable") for folder in (plain, marked)
    )
    assert {name: entry.sha256 for name, entry in one.manifest.files.items()} == {
        name: entry.sha256 for name, entry in other.manifest.files.items()
    }
    assert other.manifest.source.licence == "mit"
