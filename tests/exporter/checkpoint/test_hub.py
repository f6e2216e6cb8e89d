"""Downloads through the real `huggingface_hub` from a stand-in server, into a real cache."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from exporter.checkpoint.hub_server import COMMIT, TOKEN, Hub, Repo, serve_hub, use_hub
from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint import hub as module
from ortgpt_exporter.checkpoint.hub import ADAPTER, TOKENIZER, _ByteCounter, download, looks_like_hub_id
from ortgpt_models.progress import Progress

NEEDED = {
    "config.json": b'{"model_type": "gpt2"}',
    "generation_config.json": b'{"is": "generation_config"}',
    "README.md": b"---\nlicense: mit\n---\n",
    "vocab.json": b'{"is": "vocab"}',
    "merges.txt": b"#version: 0.2\n",
    "tokenizer.json": b'{"is": "tokenizer"}',
    "tokenizer_config.json": b'{"is": "tokenizer_config"}',
    "special_tokens_map.json": b'{"is": "special_tokens_map"}',
}
OTHER = dict.fromkeys(
    (".gitattributes", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "onnx/model.onnx", "onnx/config.json",
     "coreml/model.mlpackage", "training_args.bin", "64.tflite", "model.fp16.safetensors"),
    b"not needed",
)  # fmt: skip
WEIGHTS = os.urandom(50_000)
NEXT_COMMIT = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as served:
        served.repos["me/gpt"] = Repo(NEEDED | OTHER | {"model.safetensors": WEIGHTS, "pytorch_model.bin": b"old"})
        use_hub(served, tmp_path / "home", monkeypatch)
        yield served


def index(*shards: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"h.{i}": shard for i, shard in enumerate(shards)}}).encode()


def cached_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_what_is_needed_is_downloaded_and_the_commit_is_known(hub: Hub) -> None:
    snapshot = download("me/gpt")
    assert (snapshot.commit, snapshot.folder.name, snapshot.notes) == (COMMIT, COMMIT, ())
    assert cached_names(snapshot.folder) == sorted([*NEEDED, "model.safetensors"])
    assert sorted(path.split("/", 1)[1] for path in hub.downloads()) == sorted([*NEEDED, "model.safetensors"])
    assert (snapshot.folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (
            {"model.safetensors.index.json": index("b.safetensors", "a.safetensors", "b.safetensors"),
             "a.safetensors": b"a", "b.safetensors": b"b", "c.safetensors": b"c", "pytorch_model.bin": b"x"},
            ["a.safetensors", "b.safetensors", "model.safetensors.index.json"],
        ),
        ({"pytorch_model.bin": b"x", "pytorch_model.bin.index.json": b"{}"}, ["pytorch_model.bin"]),
        (
            {"pytorch_model.bin.index.json": index("1.bin", "2.bin"), "1.bin": b"1", "2.bin": b"2", "3.bin": b"3"},
            ["1.bin", "2.bin", "pytorch_model.bin.index.json"],
        ),
        (
            {"model.safetensors": b"x", "model.safetensors.index.json": index("a.safetensors"), "a.safetensors": b"a"},
            ["model.safetensors"],
        ),
    ],
)  # fmt: skip
def test_one_set_of_weights_is_downloaded(hub: Hub, weights: dict[str, bytes], wanted: list[str]) -> None:
    hub.repos["me/gpt"] = Repo(NEEDED | OTHER | weights)
    seen: list[Progress] = []
    folder = download("me/gpt", on_progress=seen.append).folder
    assert cached_names(folder) == sorted([*NEEDED, *wanted])
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert (seen[-1].done, seen[-1].total) == (total, total)


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (
            TOKENIZER,
            [
                "config.json",
                "merges.txt",
                "special_tokens_map.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "vocab.json",
            ],
        ),
        (ADAPTER, ["README.md", "adapter_config.json", "adapter_model.safetensors"]),
    ],
)
def test_a_tokenizer_or_an_adapter_alone(hub: Hub, part: Any, wanted: list[str]) -> None:
    hub.repos["me/gpt"].files |= {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    hub.repos["me/gpt"].files |= {"adapter_model.bin": b"x"}
    assert cached_names(download("me/gpt", part=part).folder) == wanted


def test_progress_counts_bytes_up_to_the_known_total_in_the_callers_thread(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.holds["model.safetensors"] = threading.Event()
    small = sum(map(len, NEEDED.values()))
    total = small + len(WEIGHTS)
    seen: list[Progress] = []

    def watch(progress: Progress) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(progress)
        if small < progress.done:
            hub.holds["model.safetensors"].set()

    download("me/gpt", on_progress=watch)
    assert {(progress.activity, progress.total) for progress in seen} == {("downloading me/gpt, 0.1 MB", total)}
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert [size for size in done if small < size <= small + len(WEIGHTS) // 2]
    again: list[Progress] = []
    download("me/gpt", on_progress=again.append)
    assert again[0].done == again[-1].done == total


@pytest.mark.parametrize("kind", [KeyboardInterrupt, KeyError, TypeError, ValueError, OSError, RuntimeError])
def test_an_exception_of_the_callback_ends_the_download(hub: Hub, kind: type[BaseException]) -> None:
    error = kind("the caller's own")

    def stop(progress: Progress) -> None:
        raise error

    with pytest.raises(kind) as caught:
        download("me/gpt", on_progress=stop)
    assert caught.value is error


def test_an_interrupt_ends_the_download_in_the_middle_of_a_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.holds["model.safetensors"] = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.done > 20_000:
            hub.holds["model.safetensors"].set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download("me/gpt", on_progress=stop)
    folder = Path(constants.HF_HUB_CACHE) / "models--me--gpt" / "snapshots" / COMMIT
    assert cached_names(folder) == sorted(NEEDED)
    hub.requests.clear()
    download("me/gpt")
    assert hub.downloads() == [f"{COMMIT}/model.safetensors"]


def test_a_second_run_takes_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = download("me/gpt")
    hub.requests.clear()
    assert download("me/gpt") == first
    assert hub.downloads() == []
    assert len(hub.requests) == 2  # the list of files, and which commit main is now
    hub.requests.clear()
    assert download("me/gpt", revision=COMMIT) == first  # a commit does not change: nothing to ask
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download("me/gpt") == first
    assert download("me/gpt", revision="main") == first
    assert hub.requests == []


@pytest.mark.parametrize("missing", ["config.json", "vocab.json", "model.safetensors", "README.md"])
def test_a_commit_that_is_not_cached_whole_is_completed(hub: Hub, missing: str) -> None:
    folder = download("me/gpt").folder
    (folder / missing).unlink()
    hub.requests.clear()
    assert download("me/gpt", revision=COMMIT).folder == folder
    assert cached_names(folder) == sorted([*NEEDED, "model.safetensors"])
    assert hub.requests


def test_a_tokenizer_that_is_not_cached_is_asked_for(hub: Hub) -> None:
    hub.repos["me/gpt"].files = {name: hub.repos["me/gpt"].files[name] for name in ("config.json", "model.safetensors")}
    folder = download("me/gpt").folder
    hub.repos["me/gpt"].files |= {"tokenizer.json": b"{}"}
    hub.requests.clear()
    download("me/gpt", revision=COMMIT)
    assert hub.requests
    assert cached_names(folder)[:2] == ["config.json", "model.safetensors"]


def test_a_branch_that_moves_is_followed(hub: Hub) -> None:
    repo = hub.repos["me/gpt"]
    download("me/gpt")
    repo.revisions["main"] = NEXT_COMMIT
    repo.files["model.safetensors"] = b"new"
    snapshot = download("me/gpt")
    assert snapshot.commit == NEXT_COMMIT
    assert (snapshot.folder / "model.safetensors").read_bytes() == b"new"


def test_a_branch_that_moves_meanwhile_gives_one_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = module._list_files

    def list_and_move(repo_id: str, revision: str | None) -> Any:
        files = listed(repo_id, revision)
        hub.repos["me/gpt"].revisions["main"] = NEXT_COMMIT
        hub.repos["me/gpt"].files["model.safetensors"] = b"new"
        return files

    monkeypatch.setattr(module, "_list_files", list_and_move)
    snapshot = download("me/gpt")
    assert snapshot.commit == snapshot.folder.name == NEXT_COMMIT
    assert {path.split("/")[0] for path in hub.downloads()} == {NEXT_COMMIT}
    assert (snapshot.folder / "model.safetensors").read_bytes() == b"new"


def test_a_revision_is_taken(hub: Hub) -> None:
    hub.repos["me/gpt"].revisions |= {"v1": NEXT_COMMIT, "refs/pr/1": "a" * 40}
    assert download("me/gpt", revision="v1").commit == NEXT_COMMIT
    assert download("me/gpt", revision=NEXT_COMMIT).commit == NEXT_COMMIT


def test_a_cut_connection_is_resumed_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cuts["model.safetensors"] = 30_500
    seen: list[Progress] = []
    folder = download("me/gpt", on_progress=seen.append).folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [request.range for request in hub.requests if request.path.endswith("model.safetensors")]
    assert ranges == [None, None, "bytes=30000-"]
    assert seen[-1].done == seen[-1].total


def test_the_token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.repos["me/gpt"].gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    download("me/gpt")
    assert {request.token for request in hub.requests} == {TOKEN}
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home" / "token").write_text(TOKEN)  # where `hf auth login` puts it
    hub.requests.clear()
    download("me/gpt", revision="main")
    assert {request.token for request in hub.requests} == {TOKEN}


def refused(**arguments: Any) -> str:
    """Return the error, which must be one line, of a download; it must come at once."""
    begin = time.monotonic()
    with pytest.raises(ExportError) as caught:
        download(**{"repo_id": "me/gpt"} | arguments)
    assert time.monotonic() - begin < 5
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    return str(caught.value)


def test_what_may_not_be_read_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(repo_id="me/none") == (
        f"me/none is not a folder here, and {hub.url} shows no such repository (no token is set); correct the name, or "
        "set HF_TOKEN if it is private"
    )
    hub.repos["me/gpt"].gated = True
    assert refused() == (
        f"me/gpt is gated and no token is set: ask for access at {hub.url}/me/gpt, then set HF_TOKEN or run "
        "`hf auth login`"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "is gated and the token in use has no access" in refused()
    hub.repos["me/gpt"].gated = False
    assert "has no revision 'v9' (accepted: a branch, a tag or a commit hash" in refused(revision="v9")
    assert "has no revision 'ffff" in refused(revision=NEXT_COMMIT)
    assert "the revision is empty" in refused(revision=" ")
    assert "'me--x/gpt' is not a hub id (accepted: owner/name)" in refused(repo_id="me--x/gpt")
    for status in (401, 403, 429, 500):
        hub.status = status
        reason = (
            f"answers me/gpt with status {status} (the token in use has no access); try again later, or set HF_TOKEN"
        )
        assert reason in refused()


@pytest.mark.parametrize("token", ["hf_secret\x00", "hf_secrét"])
def test_a_damaged_token_is_not_shown(hub: Hub, tmp_path: Path, token: str) -> None:
    download("me/gpt")  # what is cached does not hide it
    (tmp_path / "home" / "token").write_text(token)
    assert refused() == (
        "HF_TOKEN has characters that are not allowed in a token; set it to a token of the hub, or unset it"
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no config.json, no model.safetensors or model.safetensors.index.json or pytorch_model.bin or"),
        ({"config.json": b"{}", "tf_model.h5": b""}, r"pytorch_model.bin.index.json (found: config.json, tf_model.h5)"),
        ({"model.safetensors": b""}, "has no config.json (found: model.safetensors)"),
        ({"config.json": b"{}", "model.safetensors.index.json": b"{}"}, "weight_map is None; expected an object"),
        (
            {"config.json": b"{}", "model.safetensors.index.json": index("1.safetensors", "../../x")},
            "model.safetensors.index.json names '../../x'; expected names of files in its own folder",
        ),
        (
            {"config.json": b"{}", "model.safetensors.index.json": index("2.safetensors", "1.safetensors")},
            "lacks 1.safetensors, 2.safetensors, which its model.safetensors.index.json lists",
        ),
    ],
)  # fmt: skip
def test_a_repository_without_what_is_needed(hub: Hub, files: dict[str, bytes], reason: str) -> None:
    hub.repos["me/gpt"] = Repo(files)
    assert reason in refused()


def test_without_the_hub_the_cache_serves_and_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = download("me/gpt")
    hub.status = 503
    cached = download("me/gpt")
    assert (cached.folder, cached.commit) == (first.folder, COMMIT)
    assert cached.notes == (f"{hub.url} did not answer; me/gpt was taken from the cache, commit {COMMIT}",)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert download("me/gpt").folder == first.folder
    hub.status = 404
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert (
        refused() == f"{hub.url} answers me/gpt with status 404 (no token is set); try again later, or set HF_TOKEN"
    )  # an answer, not silence


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "nonsense", "http://["])
def test_without_network_one_line_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    message = refused()
    assert message.startswith(f"me/gpt is not a folder here, and {endpoint} cannot be reached: ")
    assert message.endswith("; check the network and HF_ENDPOINT, or copy the repository here")


def test_a_hub_that_says_nothing_is_not_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
        assert "cannot be reached: timed out; check the network" in refused()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "does not answer as a Hugging Face hub does; correct HF_ENDPOINT, or unset it"),
        (b"[]", "does not answer as a Hugging Face hub does"),
        (b"{}", "does not answer as a Hugging Face hub does"),
        (b'{"id": "me/gpt"}', "does not answer as a Hugging Face hub does"),
    ],
)
def test_a_server_that_is_no_hub_is_named(hub: Hub, body: bytes, reason: str) -> None:
    hub.body = body
    assert refused().startswith(f"{hub.url} {reason}")


def test_offline_what_is_not_cached_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    what_to_do = "run once with network and without HF_HUB_OFFLINE to download it, or set HF_HUB_CACHE to the cache"
    cache = constants.HF_HUB_CACHE
    message = refused()
    assert message.startswith(f"me/gpt is not a folder here, and there is no me/gpt in the cache {cache}; {what_to_do}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = download("me/gpt").folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"no me/gpt at v1 in the cache {cache}" in refused(revision="v1")
    (folder / "model.safetensors").unlink()
    message = refused()
    assert message.startswith(f"me/gpt in the cache {cache} has no model.safetensors or ")
    assert what_to_do in message
    assert hub.url not in message


def test_offline_every_shard_must_be_cached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = {"model.safetensors.index.json": index("1.safetensors", "2.safetensors")}
    hub.repos["me/gpt"] = Repo(NEEDED | shards | {"1.safetensors": b"1", "2.safetensors": b"2"})
    folder = download("me/gpt").folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download("me/gpt").folder == folder
    (folder / "2.safetensors").unlink()
    assert "lacks 2.safetensors, which its model.safetensors.index.json lists; run once" in refused()


def test_a_cache_that_cannot_be_written(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    message = refused()
    assert message.startswith(f"the cache {tmp_path / 'file'} cannot store me/gpt: ")
    assert message.endswith("; set HF_HUB_CACHE to a writable folder")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), "no space is left for me/gpt in the cache {}; free some, or set"),
        (
            OSError("Consistency check failed:\nsize"),
            "the download of me/gpt broke: Consistency check failed: size; run",
        ),
        (
            RuntimeError("CAS\nerror"),
            "the download of me/gpt broke: CAS error; run it again, or with HF_HUB_DISABLE_XET",
        ),
    ],
)
def test_a_download_that_breaks(hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*values: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(file_download, "http_get", fail)
    assert refused().startswith(message.format(constants.HF_HUB_CACHE))


def test_bytes_that_come_through_xet_are_counted_once() -> None:
    counter = _ByteCounter()
    with XetDownloadProgressReporter(
        name="huggingface_hub.snapshot_download",
        reconstruction_desc="",
        total=300,
        log_level=logging.WARNING,
        tqdm_class=counter.bar_class(),
    ) as reporter:
        done = []
        for received, written in ((150, 0), (200, 100), (210, 300)):
            report = SimpleNamespace(
                total_bytes=300, total_bytes_completed=written, total_transfer_bytes_completed=received,
                total_bytes_completion_rate=None, total_transfer_bytes_completion_rate=None,
            )  # fmt: skip
            reporter.update_progress(report)
            done.append(counter.done)
    assert done == [0, 100, 300]


def test_nothing_is_printed_and_logging_stays_as_it_was(
    hub: Hub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("huggingface_hub")
    handlers, filters = logger.handlers[:], list(warnings.filters)
    hub.cuts["model.safetensors"] = 100  # the library warns of it
    download("me/gpt")
    hub.status = 500
    refused(repo_id="me/none")
    assert capfd.readouterr() == ("", "")
    assert (logger.handlers, list(warnings.filters)) == (handlers, filters)
    assert all(not handler.filters for handler in handlers)


SCRIPT = """
import sys
from ortgpt_exporter.checkpoint.hub import download
assert "huggingface_hub" not in sys.modules
snapshot = download(sys.argv[1])
print(snapshot.commit, snapshot.folder)
"""


def run(*arguments: str, limit_bytes: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Download in a process of its own, whose environment `huggingface_hub` reads as it is imported."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=inherited | {"NO_PROXY": "127.0.0.1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
        check=False,
    )


def test_the_environment_is_honoured(hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/gpt"].gated = True
    online = run("me/gpt", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "other"), HF_TOKEN=TOKEN)
    folder = tmp_path / "other" / "hub" / "models--me--gpt" / "snapshots" / COMMIT
    assert (online.stdout, online.stderr) == (f"{COMMIT} {folder}\n", "")
    hub.requests.clear()
    offline = run("me/gpt", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "other" / "hub"))
    assert (offline.stdout, offline.stderr) == (f"{COMMIT} {folder}\n", "")
    assert hub.requests == []


def test_a_full_disk_is_said(hub: Hub, tmp_path: Path) -> None:
    # A limit on the size of a file stands for a full disk: the same write fails, with another number.
    done = run("me/gpt", limit_bytes=20_000, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "small"))
    assert f"ExportError: the cache {tmp_path / 'small' / 'hub'} cannot store me/gpt: File too large" in done.stderr


@pytest.mark.parametrize("name", ["openai-community/gpt2", "me/my_model.v1-x", "a/b", "1/2"])
def test_hub_ids(name: str) -> None:
    assert looks_like_hub_id(name)


@pytest.mark.parametrize(
    "name",
    ["gpt2", "", "/", "a/", "/a", "./a", "../a", "a/b/c", "a b/c", "a/ckpt.pt", "a/model.safetensors", "a/b.git",
     "~/a", "a/-b", "a--b/c", "a..b/c", "datasets/a/b", "https://huggingface.co/a/b", "a/b\n", "é/a", "a/" + "b" * 96],
)  # fmt: skip
def test_other_names_are_not_hub_ids(name: str) -> None:
    assert not looks_like_hub_id(name)
