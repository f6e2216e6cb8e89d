"""Bundles whose files are links, laid out by the tools that people keep models in; and links that lead elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import ortgpt
from ortgpt import BundleError
from ortgpt.bundle.folder import open_bundle
from ortgpt.cli.main import main
from ortgpt.tools.seal import seal_bundle
from ortgpt_exporter import Quantization, export_bundle, quantize_bundle
from support import TEXT, reseal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LONG = [1] * 50  # long enough for the prompt graph


def hub(bundle: Path, parent: Path, *, folder: str = "", absolute: bool = False) -> Path:
    """Lay a bundle out as `huggingface_hub.snapshot_download` does; some of its versions write absolute links."""
    repo = parent / "models--me--gpt"
    snapshot = repo / "snapshots" / COMMIT / folder
    for each in (repo / "blobs", repo / "refs", snapshot):
        each.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for path in bundle.iterdir():
        blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob if absolute else os.path.relpath(blob, snapshot))
    return snapshot


def hub_absolute(bundle: Path, parent: Path) -> Path:
    return hub(bundle, parent, absolute=True)


def hub_subfolder(bundle: Path, parent: Path) -> Path:
    return hub(bundle, parent, folder="onnx/int8")


def config_map(bundle: Path, parent: Path) -> Path:
    """Lay a bundle out as Kubernetes mounts a ConfigMap, a Secret or a projected volume."""
    mount = parent / "mount"
    shutil.copytree(bundle, mount / "..2026_01_01_00_00_00.1")
    (mount / "..data").symlink_to("..2026_01_01_00_00_00.1")
    for path in bundle.iterdir():
        (mount / path.name).symlink_to(Path("..data") / path.name)
    return mount


def farm(bundle: Path, parent: Path) -> Path:
    """Link each file to one folder elsewhere, as GNU Stow, Nix, Bazel and `uv pip install --link-mode symlink` do."""
    store = parent / "store" / "5k3x-gpt" / "share"
    shutil.copytree(bundle, store)
    (parent / "profile").mkdir()
    for path in bundle.iterdir():
        (parent / "profile" / path.name).symlink_to(store / path.name)
    return parent / "profile"


def linked_folder(bundle: Path, parent: Path) -> Path:
    """Link the folder of the snapshot, through another link."""
    (parent / "current").symlink_to("next")
    (parent / "next").symlink_to(hub(bundle, parent))
    return parent / "current"


LAYOUTS = (hub, hub_absolute, hub_subfolder, config_map, farm, linked_folder)
Layout = Callable[[Path, Path], Path]


def state(parent: Path) -> dict[str, bytes | str]:
    """Return the content of every file and the target of every link below a folder."""
    found = dict[str, bytes | str]()
    for path in parent.rglob("*"):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bundle_of_links_opens(layout: Layout, fast_bundle: Path, tmp_path: Path) -> None:
    """With both graphs, whose weights lie beside their names and not beside the files that the names lead to."""
    with ortgpt.load(fast_bundle) as generator:
        want = generator.generate(LONG, max_new_tokens=4).token_ids
    folder = layout(fast_bundle, tmp_path)
    before = state(tmp_path)
    for verify in ("sha256", "size"):
        with ortgpt.load(folder, verify=verify) as generator:
            assert generator.generate(LONG, max_new_tokens=4).token_ids == want
    assert CliRunner().invoke(main, ["info", str(folder)]).exit_code == 0
    with pytest.raises(BundleError, match=r"ortgpt\.json is a link to .*cp -rL.*seal the copy"):
        seal_bundle(folder)
    assert state(tmp_path) == before
    copy = Path(shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("..*")))
    assert seal_bundle(copy) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_behind_a_link_is_found(layout: Layout, small_bundle: Path, tmp_path: Path) -> None:
    folder = layout(small_bundle, tmp_path)
    for name in ("model.onnx.data", "vocab.json"):
        real = Path(os.path.realpath(folder / name))
        whole = real.read_bytes()
        real.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(BundleError, match=rf"{name} does not have the sha256"):
            ortgpt.load(folder)
        real.unlink()  # as after an interrupted download
        with pytest.raises(BundleError, match=rf"{name} is not a file, but a link to .*: No such file"):
            ortgpt.load(folder)
        real.write_bytes(whole)
    Path(os.path.realpath(folder / "ortgpt.json")).unlink()
    with pytest.raises(BundleError, match=r"ortgpt\.json is not a file, but a link to"):
        ortgpt.load(folder)


def test_a_bundle_of_links_is_quantised_and_replaced(
    small_bundle: Path, small_checkpoint: Path, tmp_path: Path
) -> None:
    source, text = hub(small_bundle, tmp_path), tmp_path / "text"
    text.write_text(TEXT * 3)
    before = state(tmp_path / "models--me--gpt")
    quantization = Quantization(dtype="int8", method="gptq", calibration=text, max_perplexity_ratio=2.0)
    quantized = quantize_bundle(source, tmp_path / "int8", quantization)
    assert state(tmp_path / "models--me--gpt") == before
    with ortgpt.load(quantized.path) as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids
    assert not [path for path in quantized.path.iterdir() if path.is_symlink()]
    blobs = state(source.parents[1] / "blobs")
    Path(os.path.realpath(source / "vocab.json")).unlink()  # a link to nowhere is no loss either
    export_bundle(small_checkpoint, source, force=True)
    assert not [path for path in source.iterdir() if path.is_symlink()]
    assert state(source.parents[1] / "blobs").items() < blobs.items()


def test_a_checkpoint_in_the_hubs_cache_is_exported(small_checkpoint: Path, tmp_path: Path) -> None:
    bundle = export_bundle(hub(small_checkpoint, tmp_path), tmp_path / "out")
    with ortgpt.load(bundle.path) as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids


def test_the_built_in_bundle_may_be_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installer may link a package's files to its cache."""
    built_in = Path(ortgpt.__file__).parent / "builtin"
    (tmp_path / "builtin").mkdir()
    farm(built_in / "austen", tmp_path).rename(tmp_path / "builtin" / "austen")
    monkeypatch.setattr("ortgpt.bundle.folder.BUILT_IN", tmp_path / "builtin")
    with ortgpt.load("austen") as generator:
        assert generator.bundle.path == tmp_path / "builtin" / "austen"


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_bundle, tmp_path / "bundle"))


@pytest.mark.parametrize("verify", ["sha256", "size"])
@pytest.mark.parametrize("way", ["absolute", "relative", "link to a link", "folder inside", "hard to see"])
def test_a_link_to_something_else_is_refused(bundle: Path, way: str, verify: str) -> None:
    """Even with the content that the manifest states: with verify="size" nobody would know, and the rule is one."""
    outside = bundle.parent / "outside"
    outside.mkdir()
    for name in ("vocab.json", "model.onnx", "model.onnx.data", "ortgpt.json"):
        path = bundle / name
        whole = path.read_bytes()
        path.rename(outside / name)
        if way == "absolute":
            path.symlink_to(outside / name)
        elif way == "relative":
            path.symlink_to(Path("..") / "outside" / name)
        elif way == "link to a link":
            (bundle / "between").symlink_to(outside / name)
            path.symlink_to("between")
        elif way == "folder inside":
            (bundle / "between").symlink_to(outside)
            path.symlink_to(Path("between") / name)
        else:
            path.symlink_to(Path("..") / "bundle" / ".." / "outside" / name)
        target = str(outside / name)
        with pytest.raises(BundleError, match=rf"{name} is a link out of the bundle, to '{target}'.*cp -rL"):
            ortgpt.load(bundle, verify=verify)
        with pytest.raises(BundleError, match=rf"{name} is a link out of the bundle"):
            seal_bundle(bundle)
        path.unlink()
        path.write_bytes(whole)
        (bundle / "between").unlink(missing_ok=True)


def test_files_in_many_folders_are_refused(small_bundle: Path, tmp_path: Path) -> None:
    """As git-annex and DVC link them. ONNX Runtime 1.32 would not find the weights there."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    for path in small_bundle.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        key = tmp_path / ".git" / "annex" / "objects" / digest[:2] / f"SHA256E-s1--{digest}"
        key.mkdir(parents=True)
        shutil.copy(path, key / key.name)
        (folder / path.name).symlink_to(os.path.relpath(key / key.name, folder))
    with pytest.raises(BundleError, match=r"ortgpt\.json is a link out of the bundle.*in place of links \(`cp -rL`\)"):
        ortgpt.load(folder)
    with ortgpt.load(shutil.copytree(folder, tmp_path / "copy")) as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids


def test_a_strangers_link_shows_nothing_of_the_file(bundle: Path) -> None:
    """Not even where the manifest knows its size and hash, and the file would be read for a vocabulary."""
    secret = bundle.parent / "secret"
    secret.write_text('{"password": "hunter2"}')
    for name in ("vocab.json", "merges.txt", "config.json", "generation_config.json", "ortgpt.json"):
        whole = (bundle / name).read_bytes()
        (bundle / name).unlink()
        (bundle / name).symlink_to(secret)
        if name != "ortgpt.json":
            reseal(bundle)
        for verify in ("sha256", "size"):
            with pytest.raises(BundleError) as caught:
                ortgpt.load(bundle, verify=verify)
            assert "out of the bundle" in str(caught.value)
            assert "hunter2" not in str(caught.value)
            assert "password" not in str(caught.value)
        (bundle / name).unlink()
        (bundle / name).write_bytes(whole)


def test_a_hard_link_and_a_link_inside_are_files(bundle: Path) -> None:
    os.link(bundle / "model.onnx.data", bundle.parent / "other name")
    (bundle / "deep" / "er").mkdir(parents=True)
    for name in ("vocab.json", "model.onnx", "model.onnx.data"):
        (bundle / name).rename(bundle / "deep" / "er" / name)
        (bundle / name).symlink_to(Path("deep") / "er" / name)
    (bundle / "config.json").rename(bundle / "real config")
    (bundle / "config.json").symlink_to("real config")
    with ortgpt.load(bundle) as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids


@pytest.mark.parametrize("target", ["a folder", "a pipe", "/dev/zero", "/dev/stdin", "itself", "nowhere", "x" * 300])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes in folders")
def test_a_link_to_what_is_no_file_is_refused_and_not_opened(bundle: Path, target: str) -> None:
    (bundle / "a folder").mkdir()
    os.mkfifo(bundle / "a pipe")
    for name in ("vocab.json", "model.onnx.data"):
        (bundle / name).unlink()
        (bundle / name).symlink_to(name if target == "itself" else target)
        with pytest.raises(BundleError, match=f"{name} is not a file"):
            ortgpt.load(bundle)
    (bundle / "ortgpt.json").unlink()
    (bundle / "ortgpt.json").symlink_to("ortgpt.json" if target == "itself" else target)
    with pytest.raises(BundleError, match=r"ortgpt\.json is not a file"):
        ortgpt.load(bundle)


def test_another_bundles_weights_are_not_taken(small_bundle: Path, fast_bundle: Path, tmp_path: Path) -> None:
    folder = hub(small_bundle, tmp_path / "one")
    other = hub(fast_bundle, tmp_path / "two")
    weights = folder / "model.onnx.data"
    shutil.copy(other / weights.name, folder.parents[1] / "blobs" / "other")
    weights.unlink()
    weights.symlink_to("../../blobs/other")
    with pytest.raises(BundleError, match=r"model\.onnx\.data has .* bytes, the manifest says"):
        ortgpt.load(folder)
    weights.unlink()
    weights.symlink_to(os.path.relpath(other / weights.name, folder))
    with pytest.raises(BundleError, match=r"model\.onnx\.data is a link out of the bundle"):
        ortgpt.load(folder)


def test_a_newer_version_is_not_mixed_in(fast_bundle: Path, tmp_path: Path) -> None:
    """Kubernetes sets the link `..data` to a new folder at any moment, and the prompt graph opens late."""
    mount = config_map(fast_bundle, tmp_path)
    shutil.copytree(fast_bundle, mount / "..2026_02_02_00_00_00.2")
    (mount / "..2026_02_02_00_00_00.2" / "prefill.onnx").touch()
    with ortgpt.load(mount) as generator:
        assert generator.generate("a", max_new_tokens=2).token_ids
        (mount / "new").symlink_to("..2026_02_02_00_00_00.2")
        (mount / "new").rename(mount / "..data")
        with pytest.raises(BundleError, match="changed after the bundle was opened; load it again"):
            generator.generate(LONG, max_new_tokens=2)
    with ortgpt.load(mount) as generator:
        assert generator.generate(LONG, max_new_tokens=2).token_ids


def test_a_file_that_changes_while_the_bundle_loads_is_noticed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was hashed has to be what was opened."""
    other = tmp_path / "other"
    shutil.copy(bundle / "model.onnx.data", other)
    read = open_bundle(bundle).verify_hashes

    def replace_after_reading(self: object, names: object = None, *, stop: object = None) -> None:
        read()
        other.replace(bundle / "model.onnx.data")

    monkeypatch.setattr("ortgpt.bundle.folder.Bundle.verify_hashes", replace_after_reading)
    with pytest.raises(BundleError, match=r"model\.onnx\.data changed after the bundle was opened"):
        ortgpt.load(bundle)


def test_a_link_to_a_file_is_not_read_as_a_manifest_alone(tmp_path: Path) -> None:
    """Its text would be quoted by the message on what is wrong with it."""
    secret = tmp_path / "private.json"
    secret.write_text('{"format": {"major": 1, "minor": 0}, "task": "hunter2"}', encoding="utf-8")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "ortgpt.json").symlink_to(secret)
    for use in (open_bundle, seal_bundle):
        with pytest.raises(BundleError, match=r"config\.json is missing") as raised:
            use(bundle)
        assert "hunter2" not in str(raised.value)


def test_a_folders_link_that_is_set_to_another_version_is_noticed(fast_bundle: Path, tmp_path: Path) -> None:
    """Stores as Nix give all files the same time, and another version may have the same sizes."""
    for version in ("v1", "v2"):
        shutil.copytree(fast_bundle, tmp_path / version)
        for path in (tmp_path / version).iterdir():
            os.utime(path, (1, 1))
    current = tmp_path / "current"
    current.symlink_to("v1")
    with ortgpt.load(current) as generator:
        current.unlink()
        current.symlink_to("v2")
        with pytest.raises(BundleError, match="changed after the bundle was opened"):
            generator.generate(LONG, max_new_tokens=2)
