"""A stand-in for the Hugging Face hub on this machine, for `huggingface_hub` to talk to; it notes every request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


@dataclass
class Repo:
    """A repository: its files, the commits that revisions stand for, and who may read it."""

    files: dict[str, Any]  # bytes, or what is like them
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    private: bool = False

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.revisions.values() else self.revisions.get(revision)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """The state of the stand-in.

    `cuts` maps a file to the bytes after which its next answer breaks off, `holds` to an event that the second half of
    its answers waits for.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    holds: dict[str, threading.Event] = field(default_factory=dict)
    status: int | None = None  # answered to everything, when set
    body: bytes | None = None  # so is this
    url: str = ""

    def downloads(self) -> list[str]:
        """Return the requested files, in order."""
        return [request.path.split("/resolve/")[1] for request in self.requests if request.method == "GET"
                and "/resolve/" in request.path]  # fmt: skip


def folder_repo(folder: Path) -> Repo:
    return Repo(
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    )


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub without repositories on a free port."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point `huggingface_hub`, which read its environment long ago, at the stand-in and at an empty cache."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    close_session()


_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")
_PATHS = (_INFO, _TREE, _FILE)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: Hub

    def log_message(self, format: str, *values: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.state.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if self.state.status is not None:
            return self.fail(self.state.status, None)
        if self.state.body is not None:
            return self.answer(self.state.body, {})
        match = next(filter(None, (pattern.fullmatch(path) for pattern in _PATHS)), None)
        repo = self.state.repos.get(match["repo"]) if match else None
        if not match or repo is None or (repo.private and token != TOKEN):
            return self.fail(404 if token else 401, "RepoNotFound")
        commit = repo.commit(match["revision"] or "main")
        if commit is None:
            return self.fail(404, "RevisionNotFound")
        if match.re is _INFO:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in repo.files.items()]
            return self.answer(json.dumps({"id": match["repo"], "sha": commit, "siblings": siblings}).encode(), {})
        if match.re is _TREE:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in repo.files.items()]  # fmt: skip
            return self.answer(json.dumps(tree).encode(), {})
        if repo.gated and token != TOKEN:  # what it has is no secret
            return self.fail(403 if token else 401, "GatedRepo")
        if match["name"] not in repo.files:
            return self.fail(404, "EntryNotFound")
        data = repo.files[match["name"]]
        return self.answer(
            data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}, name=match["name"]
        )

    def answer(self, data: bytes | memoryview, headers: dict[str, str], name: str = "") -> None:
        size, start = len(data), 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(wanted[1])
            headers = headers | {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
        self.send_response(206 if wanted else 200)
        for key, value in (headers | {"Content-Length": str(size - start), "Accept-Ranges": "bytes"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = self.state.cuts.pop(name, None)
        if name in self.state.holds:
            self.wfile.write(data[start : size // 2])
            start = size // 2
            self.state.holds[name].wait(20)
        self.wfile.write(data[start:end])
        if end is not None:
            self.close_connection = True

    def fail(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
