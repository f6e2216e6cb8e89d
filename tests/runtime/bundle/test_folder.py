"""A bundle that is not exactly what its manifest says is refused, with every fault named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortgpt
from ortgpt import BundleError, BundleNotFoundError, EngineError
from ortgpt.bundle.external_data import external_files
from ortgpt.bundle.folder import open_bundle, sha256_of
from ortgpt.bundle.writing import locked_folder
from ortgpt.cli.report import info_lines
from ortgpt.contract import File
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt.tools.seal import seal_bundle
from support import reseal


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_bundle, tmp_path / "bundle"))


def flip_a_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_an_intact_bundle_opens_from_anywhere(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_bundle(bundle).config.n_layer == 2
    moved = bundle.parent / "with a space" / "Ünïcode"
    moved.parent.mkdir()
    shutil.move(bundle, moved)
    (moved.parent / "link").symlink_to(moved)
    monkeypatch.chdir(moved.parent)
    for path in (moved, "Ünïcode", "link", str(moved)):
        with ortgpt.load(path) as generator:
            assert generator.generate("a", max_new_tokens=2).token_ids
    (moved / "README.md").write_text("notes")
    (moved / ".gitattributes").write_text("")
    open_bundle(moved)


def test_the_manifest_says_what_it_should(bundle: Path) -> None:
    values = json.loads((bundle / "ortgpt.json").read_text())
    assert values["format"] == {"major": 1, "minor": 6}
    promise = {name: value for name, value in values["precision"].pop("promise").items() if value is not None}
    assert promise == {"kind": "exact"}
    assert values["precision"] == {"dtype": "float32", "recipe": "none", "parameters": {}}
    (graph,) = values["graphs"]
    assert (graph["role"], graph["file"], graph["flavour"], graph["target"]) == (
        "decoder",
        "model.onnx",
        "native",
        "cpu",
    )
    assert graph["cache"] == {"kind": "fixed", "dtype": "float32", "head_dim": 16}
    assert set(values["files"]) == {
        "config.json", "generation_config.json", "merges.txt", "model.onnx", "model.onnx.data",
        "vocab.json",
    }  # fmt: skip
    for name, entry in values["files"].items():
        data = (bundle / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert values["source"]["id"] == "checkpoint"
    assert len(values["verification"]) == 8


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "merges.txt", "model.onnx", "model.onnx.data", "vocab.json"]
)
def test_every_file_is_checked(bundle: Path, name: str) -> None:
    path = bundle / name
    whole = path.read_bytes()
    flip_a_bit(path, len(whole) // 2)
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        ortgpt.load(bundle)
    path.write_bytes(whole[:-1])
    with pytest.raises(BundleError, match=rf"{name} has .* bytes, the manifest says"):
        ortgpt.load(bundle, verify="size")
    path.unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        ortgpt.load(bundle)
    target = bundle.parent / "elsewhere"
    target.write_bytes(whole)
    path.symlink_to(target)
    with pytest.raises(BundleError, match=f"{name} is a link out of the bundle"):
        ortgpt.load(bundle)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Let permissions count, as they do not for root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody reaches, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are those of POSIX")
def test_what_may_not_be_read_is_named(small_bundle: Path, open_folder: Path) -> None:
    path = Path(shutil.copytree(small_bundle, open_folder / "bundle"))
    path.chmod(0o755)
    for each in path.iterdir():
        each.chmod(0o644)
    opened = open_bundle(path)
    for name, read in (
        ("ortgpt.json", lambda: open_bundle(path)),
        ("config.json", lambda: open_bundle(path)),
        ("vocab.json", lambda: ByteLevelBPE.load(path)),
        ("merges.txt", lambda: ByteLevelBPE.load(path)),
        ("model.onnx", lambda: external_files(path / "model.onnx")),
        ("model.onnx.data", opened.verify_hashes),
    ):
        (path / name).chmod(0)
        with without_privileges(), pytest.raises(BundleError, match=f"bundle/{name} cannot be read: Permission denied"):
            read()
        (path / name).chmod(0o644)
    for mode in (0, 0o644, 0o311):
        path.chmod(mode)
        with without_privileges(), pytest.raises(BundleError, match=r"bundle.* cannot be read: Permission denied"):
            open_bundle(path)
    path.chmod(0o755)
    open_folder.chmod(0)
    with without_privileges(), pytest.raises(BundleError, match="/bundle cannot be read: Permission denied"):
        open_bundle(path)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are those of POSIX")
def test_a_folder_that_may_not_be_written_serves(small_bundle: Path, open_folder: Path) -> None:
    path = Path(shutil.copytree(small_bundle, open_folder / "bundle"))
    for each in path.iterdir():
        each.chmod(0o444)
    path.chmod(0o555)
    before = sorted(os.listdir(path))
    with without_privileges(), ortgpt.load(path) as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids
    assert sorted(os.listdir(path)) == before
    with without_privileges(), pytest.raises(PermissionError):
        (path / "new").touch()
    path.chmod(0o755)


def test_the_manifest_may_not_be_a_link_out(bundle: Path) -> None:
    outside = bundle.parent / "outside.json"
    (bundle / "ortgpt.json").rename(outside)
    (bundle / "ortgpt.json").symlink_to(outside)
    with pytest.raises(BundleError, match=r"ortgpt\.json is a link out of the bundle"):
        open_bundle(bundle)
    with pytest.raises(BundleError, match=r"ortgpt\.json is a link out of the bundle"):
        seal_bundle(bundle)


def test_a_message_stays_short(bundle: Path) -> None:
    names = {f"{number}\x1b[2J" + "x" * 300: {"size": 1, "sha256": "0" * 64} for number in range(1_000)}
    reseal(bundle, lambda manifest: manifest["files"].update(names))
    with pytest.raises(BundleError, match=r"not a plain file name.* and 980 more") as caught:
        open_bundle(bundle)
    assert len(str(caught.value)) < 4_000
    assert str(caught.value).isprintable()


def test_by_size_a_flipped_bit_is_not_looked_for(bundle: Path) -> None:
    flip_a_bit(bundle / "model.onnx.data", 1000)
    with pytest.raises(BundleError, match="sha256"):
        ortgpt.load(bundle)
    with ortgpt.load(bundle, verify="size") as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids
    with pytest.raises(ortgpt.OptionError, match="verify = 'none'"):
        ortgpt.load(bundle, verify="none")


@pytest.mark.parametrize("name", ["ortgpt.json", "config.json", "generation_config.json", "vocab.json", "merges.txt"])
def test_a_huge_file_is_not_read(bundle: Path, name: str) -> None:
    """Of two sparse gigabytes, which would take as many of memory."""
    with (bundle / name).open("r+b") as file:
        file.truncate(2 * 2**30)
    if name != "ortgpt.json":
        values = {"size": 2 * 2**30, "sha256": "0" * 64}
        reseal(bundle, lambda m: m["files"].update({name: values}), read=False)
    with pytest.raises(BundleError, match=f"{name} has 2,147,483,648 bytes; at most 33,554,432 are read"):
        ortgpt.load(bundle, verify="size")


@pytest.mark.parametrize(("levels", "good"), [(99, True), (100, False), (101, False)])
def test_json_has_a_hundred_levels_at_most(bundle: Path, levels: int, good: bool) -> None:
    text = '{"transformers_version": ' + "[" * levels + "]" * levels + "}"
    (bundle / "generation_config.json").write_text(text)
    reseal(bundle)
    with contextlib.nullcontext() if good else pytest.raises(BundleError, match="more than 100 lists and objects"):
        open_bundle(bundle)


def test_every_fault_is_reported_at_once(bundle: Path) -> None:
    (bundle / "vocab.json").unlink()
    (bundle / "merges.txt").write_text("x")
    (bundle / "decoder.onnx").write_text("x")
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    for part in ("vocab.json is missing", "merges.txt has 1 bytes", "'decoder.onnx' is not listed"):
        assert part in str(caught.value)


def test_a_bit_flipped_in_the_manifest_is_noticed(bundle: Path) -> None:
    whole = (bundle / "ortgpt.json").read_bytes()
    for place in range(0, len(whole), 7):
        flip_a_bit(bundle / "ortgpt.json", place)
        with pytest.raises(BundleError):
            open_bundle(bundle)
        (bundle / "ortgpt.json").write_bytes(whole)
    open_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["format"].update(major=2), "bundle format 2 is not supported"),
        (lambda m: m.update(task="translation"), "task = 'translation'"),
        (lambda m: m["architecture"].update(norm="middle"), "architecture.norm = 'middle'"),
        (lambda m: m["tokenizer"].update(kind="wordpiece"), "tokenizer.kind = 'wordpiece'"),
        (lambda m: m["tokenizer"].update(kind="tokenizer-json"), r"'tokenizer\.json' is not listed in the manifest"),
        (lambda m: m.update(graphs=[]), r"graphs = \[\]"),
        (lambda m: m["graphs"][0].update(flavour=7), r"graphs\[0\].flavour = 7"),
        (lambda m: m["graphs"][0]["cache"].update(kind=None), r"graphs\[0\].cache.kind = None"),
        (lambda m: m["graphs"][0].update(inputs=[1]), r"graphs\[0\].inputs"),
        (lambda m: m.update(masked_tokens=-1), "masked_tokens = -1"),
        (lambda m: m.update(minimum_onnxruntime="new"), "minimum_onnxruntime = 'new'"),
        (lambda m: m["files"]["model.onnx"].update(sha256="12"), "sha256 = '12'"),
        (lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}), "not a plain file name"),
        (lambda m: m["files"].pop("config.json"), "'config.json' is not listed"),
        (lambda m: m["graphs"][0].update(file="other.onnx"), "'other.onnx' is not listed"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    reseal(bundle, change)
    with pytest.raises(BundleError, match=reason):
        open_bundle(bundle)


def test_all_faults_of_a_manifest_come_in_one_message(bundle: Path) -> None:
    reseal(bundle, lambda m: m.update(task=1, files=[], masked_tokens="x"))
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    for part in ("task = 1", "files = []", "masked_tokens = 'x'"):
        assert part in str(caught.value)


def test_what_a_newer_minor_version_adds_is_ignored(bundle: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["format"]["minor"] = 7
        manifest["colour"] = manifest["source"]["x"] = "blue"

    reseal(bundle, change)
    assert open_bundle(bundle).manifest.format.minor == 7


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not readable JSON"),
        ("[]", "JSON list"),
        ("{", "not readable JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        ('{"a": 1, "a": 2}', "duplicate keys"),
        ('{"a": ' + "[" * 50_000, "not readable JSON"),
        ("\ud800", "not UTF-8 text"),
        ('{"\\ud800": 1}', "surrogates not allowed"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_hostile_json_is_refused(bundle: Path, text: str, reason: str) -> None:
    for name in ("generation_config.json", "vocab.json", "config.json", "ortgpt.json"):
        whole = (bundle / name).read_bytes()
        (bundle / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        if name != "ortgpt.json":
            reseal(bundle)
        with pytest.raises(BundleError, match=reason):
            ortgpt.load(bundle)
        (bundle / name).write_bytes(whole)
        if name != "ortgpt.json":
            reseal(bundle)
    ortgpt.load(bundle).close()


def test_defaults_beyond_the_vocabulary_are_the_bundles_fault(bundle: Path) -> None:
    defaults = json.loads((bundle / "generation_config.json").read_text())
    for name, value in (("eos_token_id", 300), ("suppress_tokens", [7, 5_000])):
        (bundle / "generation_config.json").write_text(json.dumps(defaults | {name: value}))
        reseal(bundle)
        with pytest.raises(BundleError, match=rf"generation_config\.json: {name} = {np.max(value)} is not in the"):
            ortgpt.load(bundle)


def test_bad_values_in_config_json_are_named(bundle: Path) -> None:
    config = json.loads((bundle / "config.json").read_text())
    bad = {"n_layer": 0, "n_positions": 10**30, "vocab_size": "x", "eos_token_id": 1.5}
    (bundle / "config.json").write_text(json.dumps(config | bad))
    reseal(bundle)
    with pytest.raises(BundleError, match=r"n_layer = 0.*n_positions = 10+.* vocab_size = 'x'.*eos_token_id = 1\.5"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["graphs"][0].update(flavour="magic"), "runs none of the bundle's graphs .*magic"),
        (lambda m: m["graphs"][0]["cache"].update(kind="paged"), "runs none of the bundle's graphs .*paged"),
        (lambda m: m["graphs"][0].update(target="coreml"), "runs none of the bundle's graphs .*coreml"),
        (
            lambda m: m["graphs"][0]["cache"].update(dtype="float16"),
            r"values\.0\.key is float32 .*expected float16",
        ),
        (lambda m: m["graphs"][0]["cache"].update(head_dim=12), r"past_key_values\.0\.key is .*16\), expected .*12\)"),
        (lambda m: m["graphs"][0]["inputs"].pop(), r"past_key_values\.1\.value differs from the manifest"),
        (lambda m: m.update(masked_tokens=5000), "300 ids, but the model has 300 rows of which 5000 are masked"),
    ],
)
def test_a_graph_that_is_not_what_the_manifest_says_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    reseal(bundle, change)
    with pytest.raises(BundleError, match=reason):
        ortgpt.load(bundle)


def test_a_failure_of_onnxruntime_is_an_error_of_ours(bundle: Path) -> None:
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"n_positions": 4096}))  # the graph has 64
    reseal(bundle)
    with ortgpt.load(bundle) as generator, pytest.raises(EngineError, match="ONNX Runtime failed"):
        generator.generate([1] * 100, max_new_tokens=1)


def test_a_cache_beyond_all_memory_is_an_error_of_ours(
    small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **keywords: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("ortgpt.engine.engine.FixedCache.allocate", fail)
    with pytest.raises(EngineError, match=r"no memory for a cache of 0\.0 GiB; ask for fewer tokens"):
        small.generate("a", max_new_tokens=4)


def test_generation_defaults_that_are_not_accepted_are_the_bundles_fault(bundle: Path) -> None:
    (bundle / "generation_config.json").write_text('{"temperature": "hot"}')
    reseal(bundle)
    with pytest.raises(BundleError, match=r"generation_config\.json: temperature = 'hot'"):
        ortgpt.load(bundle)


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
def test_a_second_seal_says_that_another_process_seals(bundle: Path) -> None:
    (bundle / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    before = (bundle / "ortgpt.json").read_bytes()
    with locked_folder(bundle) as locked:  # as seal_bundle() holds it
        assert locked
        command = [sys.executable, "-m", "ortgpt", "seal", str(bundle)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = f"Error: {bundle} is being sealed by another process; run this again when that has ended\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert (bundle / "ortgpt.json").read_bytes() == before
    assert seal_bundle(bundle) == ["generation_config.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="names what reaches the disk by /proc")
def test_a_new_manifest_reaches_the_disk_and_its_name_after_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    before = (bundle / "ortgpt.json").read_bytes()
    synced: list[tuple[str, bool]] = []

    def sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((re.sub("[0-9a-f]{8}", "*", name), (bundle / "ortgpt.json").read_bytes() == before))

    monkeypatch.setattr(os, "fsync", sync)
    seal_bundle(bundle)
    assert synced == [(".ortgpt.json.*.partial", True), (bundle.name, False)]


def test_names_that_windows_reads_as_another_drive_or_stream_are_refused(bundle: Path) -> None:
    for name in ("C:model.onnx", "model.onnx:x"):
        entry = {name: {"size": 1, "sha256": "0" * 64}}
        reseal(bundle, lambda manifest: manifest["files"].update(entry), read=False)  # noqa: B023  # called at once
        with pytest.raises(BundleError, match=rf"lists '{name}', which is not a plain file name"):
            open_bundle(bundle)


def test_sealing_keeps_what_a_newer_version_wrote(bundle: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["format"]["minor"] = 7
        manifest["colour"] = manifest["graphs"][0]["colour"] = "blue"

    reseal(bundle, change)
    (bundle / "generation_config.json").write_text("{}")
    assert seal_bundle(bundle) == ["generation_config.json"]
    values = json.loads((bundle / "ortgpt.json").read_text())
    assert (values["colour"], values["graphs"][0]["colour"]) == ("blue", "blue")
    assert open_bundle(bundle).manifest.format.minor == 7


def test_sealing_reads_nothing_outside_the_bundle(bundle: Path) -> None:
    reseal(bundle, lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}))
    (bundle.parent / "x").write_text("x")
    with pytest.raises(BundleError, match="not a plain file name"):
        seal_bundle(bundle)


def test_a_graph_of_another_shape_is_refused(bundle: Path) -> None:
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    reseal(bundle)
    with pytest.raises(BundleError, match=r"not the native decoder of 3 layers.*past_key_values\.2\.key"):
        ortgpt.load(bundle)
    (bundle / "config.json").write_text(json.dumps(config | {"n_head": 2, "vocab_size": 299}))
    reseal(bundle)
    with pytest.raises(BundleError, match=r"logits.*299"):
        ortgpt.load(bundle)


def test_sealing_after_a_hand_edit(bundle: Path) -> None:
    (bundle / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "eos_token_id": 0}')
    with pytest.raises(BundleError, match="ortgpt seal"):
        ortgpt.load(bundle)
    assert seal_bundle(bundle) == ["generation_config.json"]
    assert seal_bundle(bundle) == []
    assert not [name for name in os.listdir(bundle) if "partial" in name]
    with ortgpt.load(bundle) as generator:
        assert generator.generate("a", max_new_tokens=4, seed=1).token_ids


def test_sealing_takes_no_damage_for_an_edit(bundle: Path) -> None:
    manifest = (bundle / "ortgpt.json").read_bytes()
    for name in ("model.onnx.data", "model.onnx", "vocab.json", "merges.txt", "config.json"):
        whole = (bundle / name).read_bytes()
        (bundle / name).write_bytes(whole[:-1])
        with pytest.raises(BundleError, match=f"{name} was changed, and is not a file to edit by hand. Copy or export"):
            seal_bundle(bundle)
        with pytest.raises(BundleError) as caught:
            open_bundle(bundle)
        assert "ortgpt seal" not in str(caught.value)
        (bundle / name).write_bytes(whole)
    for text in ('{"temperature": "hot"}', '{"top_p": NaN}', "{"):
        (bundle / "generation_config.json").write_text(text)
        with pytest.raises(BundleError, match=r"generation_config\.json"):
            seal_bundle(bundle)
    assert (bundle / "ortgpt.json").read_bytes() == manifest


@pytest.mark.parametrize("make", [getattr(os, "mkfifo", os.mkdir), os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_not_called_missing(bundle: Path, make: Callable[[Path], None]) -> None:
    (bundle / "vocab.json").unlink()
    make(bundle / "vocab.json")
    with pytest.raises(BundleError, match=r"vocab\.json is (not a file|a link out)"):
        open_bundle(bundle)
    (bundle / "ortgpt.json").unlink()
    make(bundle / "ortgpt.json")
    with pytest.raises(BundleError, match=r"ortgpt\.json is not a file"):
        open_bundle(bundle)


def test_the_current_folder_may_change(fast_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fast_bundle.parent)
    with ortgpt.load(fast_bundle.name) as generator:
        monkeypatch.chdir("/")
        assert generator.generate([1] * 50, max_new_tokens=2).token_ids  # opens the prefill graph
        generator.bundle.verify_hashes()


def test_a_graph_that_is_gone_when_it_is_wanted_is_the_bundles_fault(fast_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(fast_bundle, tmp_path / "bundle"))
    with ortgpt.load(bundle) as generator:
        (bundle / "prefill.onnx").unlink()
        with pytest.raises(BundleError, match=r"prefill\.onnx is missing"):
            generator.generate([1] * 50, max_new_tokens=2)


@pytest.mark.parametrize("path", [None, 5, b"bytes", ["a"]])
def test_what_is_no_path_is_named(path: Any) -> None:
    with pytest.raises(ortgpt.OptionError, match=r"path = .*accepted: a text or a path"):
        ortgpt.load(path)


def test_a_path_that_is_no_utf8_is_refused(bundle: Path) -> None:
    named = bundle.parent / os.fsdecode(b"\xff")
    bundle.rename(named)
    with pytest.raises(BundleNotFoundError, match=r"\\udcff' is not UTF-8.*rename"):
        ortgpt.load(named)


@pytest.mark.parametrize("value", ["x", True, [1], 10**4000])
def test_a_promise_that_is_no_number_is_named(bundle: Path, value: Any) -> None:
    reseal(bundle, lambda m: m["precision"].update(promise={"kind": "bounded", "logit_bound": value}))
    with pytest.raises(BundleError, match=r"precision\.promise\.logit_bound = ") as caught:
        open_bundle(bundle)
    assert len(str(caught.value)) < 400


def test_no_bundle_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "file", "is a file"),
        (tmp_path, "holds no"),
    ):
        with pytest.raises(BundleNotFoundError, match=reason) as caught:
            ortgpt.load(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, ValueError)


def test_sha256_is_sha256(tmp_path: Path) -> None:
    data = os.urandom(3 * 2**20 + 5)
    (tmp_path / "x").write_bytes(data)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_a_truncated_model_with_a_true_manifest_is_an_error_of_the_bundle(bundle: Path) -> None:
    path = bundle / File.MODEL
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    reseal(bundle)
    with pytest.raises(BundleError, match=r"model\.onnx is not an ONNX file"):
        ortgpt.load(bundle)


def test_seal_writes_through_no_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (bundle / ".ortgpt.json.partial").symlink_to(tmp_path / "victim")
    seal_bundle(bundle)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (bundle / "ortgpt.json").is_symlink()


def test_a_bundle_of_the_format_before_is_read_and_shown(bundle: Path) -> None:
    """Format 1.2 had other names for the numbers of a promise."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["format"]["minor"] = 2
        changed = {"batch": 2.9, "outlier": 1.0, "piece": 6.8, "step": 9.7}
        promise = {"kind": "bounded", "logit_bound": 0.25}
        promise |= {f"{kind}_flips_per_1000_tokens": number for kind, number in changed.items()}
        manifest["precision"] |= {"dtype": "int8", "promise": promise}

    reseal(bundle, change)
    (line,) = (line for line in info_lines(open_bundle(bundle)) if line.startswith("promises"))
    assert line.endswith(
        "  bounded: a logit moves by at most 0.25; best tokens changed of 1,000: 2.9 in a batch, 1.0 beside a row of "
        "outliers, 6.8 in a whole prefill, 9.7 in steps of four"
    )


@pytest.mark.parametrize("version", [{}, {"major": 1}, {"minor": 2}, None, 1])
def test_a_manifest_without_its_format_is_refused(bundle: Path, version: Any) -> None:
    reseal(bundle, lambda manifest: manifest.update(format=version))
    with pytest.raises(BundleError, match="format"):
        open_bundle(bundle)
