"""Repositories of the Hugging Face hub: which of their files are needed, and those files in the local cache.

Transfer, cache, tokens and the environment variables (HF_HUB_OFFLINE, HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT)
are `huggingface_hub`'s; it is imported by the first call. Knows no tensors and no tokenizers.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortgpt.contract import File
from ortgpt.strict_json import read_json_object
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.hub_errors import one_line_errors
from ortgpt_exporter.tokenizer_files import ADDED_TOKENS_JSON
from ortgpt_models.adapter import ADAPTER_FILES
from ortgpt_models.adapter_config import ADAPTER_CONFIG_FILE
from ortgpt_models.weights import CONFIG_FILE, WEIGHTS_SOURCES

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_NAME}/{_NAME}")
# Endings of files: a path with one of these that does not exist is a mistyped path, not a repository.
_FILE_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json", ".git")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0
_INDEX = ".index.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is wanted of a repository: files that must be there, the first found of several, files that may be there."""

    required: tuple[str, ...] = ()
    one_of: tuple[str, ...]
    optional: tuple[str, ...] = ()


TOKENIZER = Part(
    one_of=(File.VOCAB, File.TOKENIZER),
    optional=(File.VOCAB, File.MERGES, File.TOKENIZER, ADDED_TOKENS_JSON, File.TOKENIZER_CONFIG),
)
CHECKPOINT = Part(
    required=(CONFIG_FILE,),
    one_of=WEIGHTS_SOURCES,
    optional=(File.GENERATION_CONFIG, "README.md", *TOKENIZER.optional),
)
ADAPTER = Part(required=(ADAPTER_CONFIG_FILE,), one_of=ADAPTER_FILES, optional=("README.md",))


@dataclass(frozen=True)
class DownloadProgress:
    """Bytes of a repository's files that are here, of `total_bytes` (None where the hub states no sizes)."""

    repo_id: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True)
class Snapshot:
    """A folder of the cache that holds the files of one commit, and facts worth telling in one line each."""

    folder: Path
    commit: str
    notes: tuple[str, ...] = ()


class _NotCachedError(ExportError):
    """The cache does not have all that is needed."""


def looks_like_hub_id(name: str) -> bool:
    """Say whether `name` has the form owner/name, and not that of a file; whether it exists is another question."""
    return (
        bool(_REPO_ID.fullmatch(name))
        and "--" not in name
        and ".." not in name
        and len(name) <= 96
        and not name.endswith(_FILE_ENDINGS)
    )


def download(
    repo_id: str,
    *,
    revision: str | None = None,
    part: Part = CHECKPOINT,
    on_progress: Callable[[DownloadProgress], None] = lambda progress: None,
) -> Snapshot:
    """Bring the files of `part` into the cache of `huggingface_hub`, and return their folder and commit.

    `revision` is a branch (by default `main`), tag or commit hash. A commit that is cached whole needs no network;
    offline, or where the hub does not answer, the cached snapshot serves. Raises ExportError, or BundleError for an
    index of weights that is no JSON.
    """
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if revision is not None and not revision.strip():
        raise ExportError("the revision is empty (accepted: a branch, a tag or a commit hash of the repository)")
    with _quiet(), one_line_errors(repo_id, revision):
        if constants.is_offline_mode():
            return _cached(repo_id, revision, part)
        if revision is not None and _COMMIT.fullmatch(revision):
            with contextlib.suppress(_NotCachedError):
                return _cached(repo_id, revision, part, whole=True)
        try:
            commit, sizes = _list_files(repo_id, revision)
        except (httpx2.TransportError, HfHubHTTPError) as error:
            answered = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
            if answered or isinstance(error, httpx2.LocalProtocolError):
                raise
            with contextlib.suppress(_NotCachedError):
                cached = _cached(repo_id, revision, part)
                note = (
                    f"{constants.ENDPOINT} did not answer; {repo_id} was taken from the cache, commit {cached.commit}"
                )
                return replace(cached, notes=(note,))
            raise
        return _fetch(repo_id, revision, part, commit, sizes, on_progress)


def _list_files(repo_id: str, revision: str | None) -> tuple[str, dict[str, int | None]]:
    """Return the commit hash of a revision, and the size in bytes of each of its files."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(library_name="ortgpt")
    try:
        info = api.model_info(repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, (HfHubHTTPError, HFValidationError, UnicodeError)):
            raise
        raise ExportError(
            f"{constants.ENDPOINT} does not answer as a Hugging Face hub does; correct HF_ENDPOINT, or unset it"
        ) from error
    if info.sha is None or info.siblings is None:
        raise ExportError(f"{constants.ENDPOINT} names no commit and no files of {repo_id}; try again later")
    return info.sha, {file.rfilename: file.size for file in info.siblings}


def _fetch(
    repo_id: str,
    revision: str | None,
    part: Part,
    commit: str,
    sizes: Mapping[str, int | None],
    on_progress: Callable[[DownloadProgress], None],
) -> Snapshot:
    """Download what `part` needs: first one file by the revision's name, the others by the commit it has now."""
    from huggingface_hub import constants, hf_hub_download

    def fetch(name: str, at: str, tally: _Tally) -> Path:
        return Path(hf_hub_download(repo_id, name, revision=at, library_name="ortgpt", tqdm_class=tally.bar_class))

    where = f"{repo_id} on {constants.ENDPOINT}"
    names = _choose(sizes, part, where)
    # By the revision's name, so that the cache remembers which commit the name stands for.
    first = fetch(names[0], revision or constants.DEFAULT_REVISION, _Tally(repo_id, None, lambda progress: None))
    if first.parent.name != commit:  # the branch has moved since it was listed
        commit, sizes = _list_files(repo_id, first.parent.name)
        names = _choose(sizes, part, where)
    if names[0].endswith(_INDEX):
        names += _shards(fetch(names[0], commit, _Tally(repo_id, None, lambda progress: None)), sizes, where)
    wanted = [sizes.get(name) for name in names]
    tally = _Tally(repo_id, None if None in wanted else sum(size or 0 for size in wanted), on_progress)
    for name, size_bytes in zip(names, wanted, strict=True):
        fetch(name, commit, tally)
        tally.finish(size_bytes)
    return Snapshot(first.parent, commit)


def _cached(repo_id: str, revision: str | None, part: Part, *, whole: bool = False) -> Snapshot:
    """Return the snapshot that the cache holds. Raises ExportError when it lacks what is needed.

    What may be missing from a repository may have been left out of the cache, too: `whole` wants a tokenizer as well.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    where = f"{repo_id}{f' at {revision}' if revision else ''} in the cache {constants.HF_HUB_CACHE}"
    for anchor in part.required or part.one_of:
        path = try_to_load_from_cache(repo_id, anchor, revision=revision)
        if isinstance(path, str):
            break
    else:
        raise _NotCachedError(f"{repo_id} is no folder here, and no {where}; {_go_online()}")
    folder = Path(path).parent
    names = {file.name for file in folder.iterdir() if file.is_file()}
    try:
        chosen = _choose(names, part, where)
        if chosen[0].endswith(_INDEX):
            _shards(folder / chosen[0], names, where)
    except ExportError as error:
        raise _NotCachedError(f"{error}; {_go_online()}") from None
    if whole and part is CHECKPOINT and not names & set(TOKENIZER.one_of):
        raise _NotCachedError(f"{where} has no tokenizer; {_go_online()}")
    return Snapshot(folder, folder.name)


def _go_online() -> str:
    return (
        "run once with network and without HF_HUB_OFFLINE to download it, or set HF_HUB_CACHE to the cache that has it"
    )


def _choose(names: Collection[str], part: Part, where: str) -> list[str]:
    """Return the files to have of those that are there; an index of weights first, weights last.

    Raises ExportError naming what is missing.
    """
    chosen = next((name for name in part.one_of if name in names), None)
    missing = [name for name in part.required if name not in names]
    if chosen is None:
        missing.append(" or ".join(part.one_of))
    if missing or chosen is None:
        found = ", ".join(sorted(name for name in names if "/" not in name and not name.startswith("."))[:12])
        raise ExportError(f"{where} has no {', no '.join(missing)} (found: {found or 'nothing'})")
    others = [name for name in (*part.required, *part.optional) if name in names and name != chosen]
    return [chosen, *others] if chosen.endswith(_INDEX) else [*others, chosen]


def _shards(index: Path, names: Collection[str], where: str) -> list[str]:
    """Return the files of weights that an index lists. Raises ExportError for one that is not there."""
    weight_map = read_json_object(index).get("weight_map")
    listed = list(weight_map.values()) if isinstance(weight_map, dict) else []
    shards = sorted({name for name in listed if isinstance(name, str)})
    if not shards or not all(isinstance(name, str) for name in listed):
        raise ExportError(f"{index} has no weight_map from tensors to files; expected an index of `transformers`")
    missing = [name for name in shards if name not in names or "/" in name]
    if missing:
        raise ExportError(f"{where} lacks {', '.join(missing[:5])}, which its {index.name} lists")
    return shards


class _Tally:
    """Adds up what the progress bars of single files are told, and shows nothing itself."""

    def __init__(self, repo_id: str, total_bytes: int | None, on_progress: Callable[[DownloadProgress], None]) -> None:
        self._repo_id = repo_id
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._whole_bytes = 0  # of the files that are here
        self._part_bytes = 0  # of the file that is coming

    def add(self, size_bytes: int) -> None:
        self._part_bytes += size_bytes
        self._report()

    def finish(self, size_bytes: int | None) -> None:
        """Count a file that is here now, whether it came or was cached."""
        self._whole_bytes += self._part_bytes if size_bytes is None else size_bytes
        self._part_bytes = 0
        self._report()

    def _report(self) -> None:
        self._on_progress(DownloadProgress(self._repo_id, self._whole_bytes + self._part_bytes, self._total_bytes))

    @property
    def bar_class(self) -> Any:
        """Return what `huggingface_hub` takes for a class of tqdm bars; bytes count when written, not when received."""
        tally = self

        class Bar:
            def __init__(self, **settings: Any) -> None:
                self.n = 0
                self.total = settings.get("total")

            def update(self, n: float | None = 1) -> None:
                tally.add(int(n or 0))

            def ignore(self, *values: Any, **settings: Any) -> None: ...

            update_transfer = set_postfix_str = set_transfer_postfix_str = refresh = close = __exit__ = ignore

            def __enter__(self) -> Bar:
                return self

        return Bar


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep `huggingface_hub` from writing to stderr meanwhile; what it logs still goes to the caller's own handlers."""
    import huggingface_hub  # noqa: F401  (its logger gets its handler when it is imported)

    def mute(record: logging.LogRecord) -> bool:
        return False

    own = [item for item in logging.getLogger("huggingface_hub").handlers if type(item) is logging.StreamHandler]
    for handler in own:
        handler.addFilter(mute)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="huggingface_hub")
            yield
    finally:
        for handler in own:
            handler.removeFilter(mute)
