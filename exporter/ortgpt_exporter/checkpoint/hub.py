"""Download what an export needs of a Hugging Face repository into the cache of `huggingface_hub`.

`huggingface_hub` does the transfer, the cache and the tokens, and reads the environment variables (HF_HUB_OFFLINE,
HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT). It is imported by the first call. Knows no tensors and no tokenizers.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortgpt.contract import File
from ortgpt_exporter.checkpoint.lora import ADAPTER_CONFIG_FILE, ADAPTER_FILES
from ortgpt_exporter.checkpoint.special_tokens import SPECIAL_TOKENS_MAP
from ortgpt_exporter.checkpoint.tokenizer_names import (
    ADDED_TOKENS,
    MERGES_NAMES,
    OTHER_NAMES,
    VOCAB_NAMES,
    WORDPIECE_VOCAB,
)
from ortgpt_exporter.errors import ExportError
from ortgpt_models.errors import ModelError
from ortgpt_models.hf_checkpoint import CONFIG_FILE, WEIGHTS_SOURCES, how_to_convert
from ortgpt_models.progress import OnProgress, Progress
from ortgpt_models.quiet import quiet_warnings
from ortgpt_models.tensor_files import INDEX_SUFFIX, read_weight_map

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_NAME}/{_NAME}")
# A path with one of these endings that does not exist is a mistyped path, not a repository.
_FILE_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json", ".git")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0
_REPORT_EVERY_S = 0.1
_GO_ONLINE = (
    "run once with network and without HF_HUB_OFFLINE to download it, or set HF_HUB_CACHE to the cache that has it"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The files to take from a repository."""

    required: tuple[str, ...] = ()
    """Files that the repository must have."""
    one_of: tuple[str, ...]
    """Files of which the repository must have one; only the first that it has is taken, and the shards it lists."""
    optional: tuple[str, ...] = ()
    """Files to take if the repository has them."""


TOKENIZER = Part(
    one_of=(File.VOCAB, File.TOKENIZER, VOCAB_NAMES[1], WORDPIECE_VOCAB, *OTHER_NAMES),
    optional=(
        *VOCAB_NAMES,
        *MERGES_NAMES,
        File.TOKENIZER,
        ADDED_TOKENS,
        SPECIAL_TOKENS_MAP,
        File.TOKENIZER_CONFIG,
        WORDPIECE_VOCAB,
        File.CONFIG,
        *OTHER_NAMES,
    ),
)
CHECKPOINT = Part(
    required=(CONFIG_FILE,),
    one_of=WEIGHTS_SOURCES,
    optional=(File.GENERATION_CONFIG, "README.md", *(name for name in TOKENIZER.optional if name != CONFIG_FILE)),
)
ADAPTER = Part(required=(ADAPTER_CONFIG_FILE,), one_of=ADAPTER_FILES, optional=("README.md",))


@dataclass(frozen=True)
class Snapshot:
    """The files of one commit in the cache."""

    folder: Path
    """The folder of the cache that holds them."""
    commit: str
    """The commit hash, 40 hexadecimal digits."""
    notes: tuple[str, ...] = ()
    """Facts to tell the user, one line each."""


class _NotCachedError(ExportError):
    """The cache does not have every file that is needed."""


def looks_like_hub_id(name: str) -> bool:
    """Say whether `name` has the form owner/name and is not a file's; the repository need not exist."""
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
    on_progress: OnProgress = lambda progress: None,
) -> Snapshot:
    """Bring the files of `part` into the cache of `huggingface_hub`, and return their folder and commit.

    `revision` is a branch (default: `main`), a tag or a commit hash. Files that the cache has are not downloaded again.
    A commit that is cached whole needs no network. Offline, or if the hub does not answer, the cached snapshot serves.
    `on_progress` counts bytes; it is called in the caller's thread, and an exception that it raises ends the download
    and reaches the caller. Raises ExportError, one line for each failure.
    """
    from huggingface_hub import constants

    if revision is not None and not revision.strip():
        raise ExportError("the revision is empty (accepted: a branch, a tag or a commit hash of the repository)")
    with _quiet():
        if constants.is_offline_mode():
            return _cached(repo_id, revision, part)
        if revision is not None and _COMMIT.fullmatch(revision):
            with contextlib.suppress(_NotCachedError):
                return _cached(repo_id, revision, part, whole=True)
        try:
            commit, sizes = _list_files(repo_id, revision)
        except ExportError as error:
            if not _is_silence(error.__cause__):
                raise
            with contextlib.suppress(_NotCachedError):
                cached = _cached(repo_id, revision, part)
                place = f"the cache, commit {cached.commit}"
                return replace(
                    cached, notes=(f"{constants.ENDPOINT} did not answer; {repo_id} was taken from {place}",)
                )
            raise
        return _fetch(repo_id, revision, part, commit, sizes, on_progress)


def _list_files(repo_id: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """Return the commit hash of a revision, and the size in bytes of each of its files."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError

    with _one_line_errors(repo_id, revision):
        try:
            info = HfApi(library_name="ortgpt").model_info(
                repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
            )
            if info.sha is not None and info.siblings is not None:
                return info.sha, {file.rfilename: file.size or 0 for file in info.siblings}
        except (HFValidationError, UnicodeError):
            raise
        except (ValueError, KeyError, TypeError):  # what an answer that is not a hub's makes of the library
            pass
        raise ExportError(
            f"{constants.ENDPOINT} does not answer as a Hugging Face hub does; correct HF_ENDPOINT, or unset it"
        )


def _is_silence(error: BaseException | None) -> bool:
    """Say whether the hub did not answer, rather than refuse."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return bool(error.response.status_code >= 500)
    return isinstance(error, httpx2.HTTPError) and not isinstance(error, httpx2.LocalProtocolError)  # a damaged token


def _fetch(
    repo_id: str, revision: str | None, part: Part, commit: str, sizes: dict[str, int], on_progress: OnProgress
) -> Snapshot:
    """Download the files of `part`; `sizes` has the size in bytes of each file of `commit`."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    counter = _ByteCounter()

    def snapshot(names: list[str]) -> Path:
        # The revision goes by its name, so that the cache remembers which commit it is. With one worker, an error or
        # Ctrl-C ends the download with the file that is on its way.
        with _one_line_errors(repo_id, revision):
            folder = snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=[glob.escape(name) for name in names],
                library_name="ortgpt",
                max_workers=1,
                tqdm_class=counter.bar_class(),
            )
        return Path(folder)

    place = f"{repo_id} on {constants.ENDPOINT}"
    names = _choose(sizes, part, place)
    if names[-1].endswith(INDEX_SUFFIX):
        names += _shards(snapshot(names[-1:]) / names[-1], sizes, place)
    total = sum(sizes[name] for name in names)
    cached = (name for name in names if isinstance(try_to_load_from_cache(repo_id, name, revision=commit), str))
    counter.done = sum(sizes[name] for name in cached)
    activity = f"downloading {repo_id}, {total / 1e6:,.1f} MB"
    folder = counter.run(
        lambda: snapshot(names), lambda done: on_progress(Progress(activity, min(done, total), max(total, 1)))
    )
    on_progress(Progress(activity, max(total, 1), max(total, 1)))
    if folder.name != commit:  # the branch moved after its files were listed
        return download(repo_id, revision=folder.name, part=part, on_progress=on_progress)
    return Snapshot(folder, commit)


def _cached(repo_id: str, revision: str | None, part: Part, *, whole: bool = False) -> Snapshot:
    """Return the snapshot that the cache holds. Raises _NotCachedError if it lacks what is needed.

    With `whole`, what is needed includes the tokenizer, and every optional file that the repository is known to have.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    place = f"{repo_id}{f' at {revision}' if revision else ''} in the cache {constants.HF_HUB_CACHE}"
    wanted = [*part.required, *part.optional] if whole else []
    with _one_line_errors(repo_id, revision):
        try:
            folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=wanted))
        except LocalEntryNotFoundError:
            here = f"{repo_id} is not a folder here, and there is no {place}"
            raise _NotCachedError(f"{here}; {_GO_ONLINE}") from None
    names = {file.name for file in folder.iterdir() if file.is_file()}
    try:
        source = _choose(names, part, place)[-1]
        if source.endswith(INDEX_SUFFIX):
            _shards(folder / source, names, place)
        has_pair = names & {*VOCAB_NAMES} and names & {*MERGES_NAMES}
        has_tokenizer = has_pair or names & {File.TOKENIZER, WORDPIECE_VOCAB}
        if whole and File.MERGES in part.optional and not has_tokenizer:
            raise ExportError(f"{place} has no tokenizer")
    except ExportError as error:
        raise _NotCachedError(f"{error}; {_GO_ONLINE}") from None
    return Snapshot(folder, folder.name)


def _choose(names: Collection[str], part: Part, place: str) -> list[str]:
    """Return the files to take from `names`, that of `part.one_of` last. Raises ExportError naming what is missing."""
    source = next((name for name in part.one_of if name in names), None)
    missing = [name for name in part.required if name not in names]
    if source is None:
        missing.append(" or ".join(part.one_of))
    if missing or source is None:
        others = ", ".join(sorted(name for name in names if "/" not in name and not name.startswith("."))[:12])
        found = f"{place} has no {', no '.join(missing)} (found: {others or 'nothing'})"
        wants_weights = part.one_of == WEIGHTS_SOURCES and source is None
        raise ExportError(f"{found}; {how_to_convert(sorted(names))}" if wants_weights else found)
    return [*(name for name in (*part.required, *part.optional) if name in names and name != source), source]


def _shards(index: Path, names: Collection[str], place: str) -> list[str]:
    """Return the files that an index lists. Raises ExportError if it is damaged, or lists one not in `names`."""
    try:
        shards = sorted(set(read_weight_map(index).values()))
    except ModelError as error:
        raise ExportError(str(error)) from error
    missing = [name for name in shards if name not in names]
    if missing:
        raise ExportError(f"{place} lacks {', '.join(missing[:5])}, which its {index.name} lists")
    return shards


class _ByteCounter:
    """Counts the bytes that `huggingface_hub` writes in a thread of its own, and can stop that thread."""

    def __init__(self) -> None:
        self.done = 0
        self.stopped = False

    def run(self, job: Callable[[], Path], report: Callable[[int], None]) -> Path:
        """Return what `job` returns; while it runs, call `report` in this thread with the bytes done."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(job)
            try:
                while not future.done():
                    report(self.done)
                    wait([future], _REPORT_EVERY_S)
            except BaseException:
                self.stopped = True
                raise
        return future.result()

    def bar_class(self) -> Any:
        """Return a class of tqdm bars that show nothing; the bar of bytes written adds to this counter."""
        from huggingface_hub.utils.tqdm import tqdm

        counter = self

        class Bar(tqdm):
            def __init__(self, *args: Any, name: str | None = None, **settings: Any) -> None:
                super().__init__(*args, **settings | {"disable": True})  # type: ignore[no-untyped-call]  # tqdm has no types
                self.counts_bytes = name == "huggingface_hub.snapshot_download"

            def update(self, n: float | None = 1) -> None:
                if counter.stopped:
                    raise InterruptedError("the download was stopped")
                if self.counts_bytes:
                    counter.done += int(n or 0)

        return Bar


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the warnings and the log of `huggingface_hub` from stderr; handlers of the caller still get the log."""
    import huggingface_hub  # noqa: F401  # its logger gets its handler when it is imported

    def mute(record: logging.LogRecord) -> bool:
        return False

    own = [item for item in logging.getLogger("huggingface_hub").handlers if type(item) is logging.StreamHandler]
    for handler in own:
        handler.addFilter(mute)
    try:
        with quiet_warnings():
            yield
    finally:
        for handler in own:
            handler.removeFilter(mute)


@contextlib.contextmanager
def _one_line_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into ExportError."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # of httpx2, huggingface_hub, hf_xet and the file system
        raise ExportError(_message(error, repo_id, revision)) from error


def _message(error: BaseException, repo_id: str, revision: str | None) -> str:
    """Say in one line what went wrong and what to do; never the token."""
    import httpx2
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).split())[:200] or type(error).__name__
    hub, cache = constants.ENDPOINT, f"the cache {constants.HF_HUB_CACHE}"
    token = "the token in use has no access" if get_token() else "no token is set"
    match error:
        case errors.GatedRepoError():
            what_to_do = "then set HF_TOKEN or run `hf auth login`"
            return f"{repo_id} is gated and {token}: ask for access at {hub}/{repo_id}, {what_to_do}"
        case errors.RepositoryNotFoundError():
            what_to_do = "correct the name, or set HF_TOKEN if it is private"
            return f"{repo_id} is not a folder here, and {hub} shows no such repository ({token}); {what_to_do}"
        case errors.RevisionNotFoundError():
            accepted = f"a branch, a tag or a commit hash; see {hub}/{repo_id}/commits"
            return f"{repo_id} has no revision {revision or constants.DEFAULT_REVISION!r} (accepted: {accepted})"
        case errors.HfHubHTTPError():
            status = error.response.status_code
            return f"{hub} answers {repo_id} with status {status} ({token}); try again later, or set HF_TOKEN"
        case httpx2.LocalProtocolError() | UnicodeError():  # their own messages would show the token
            return "HF_TOKEN has characters that are not allowed in a token; set it to a token of the hub, or unset it"
        case httpx2.HTTPError() | httpx2.InvalidURL() | errors.LocalEntryNotFoundError():
            what_to_do = "check the network and HF_ENDPOINT, or copy the repository here"
            return f"{repo_id} is not a folder here, and {hub} cannot be reached: {said}; {what_to_do}"
        case errors.HFValidationError():
            return f"{repo_id!r} is not a hub id (accepted: owner/name): {said}"
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space is left for {repo_id} in {cache}; free some, or set HF_HUB_CACHE to a folder elsewhere"
        case OSError() if error.errno is not None:
            return f"{cache} cannot store {repo_id}: {error.strerror}; set HF_HUB_CACHE to a writable folder"
    return f"the download of {repo_id} broke: {said}; run it again, or with HF_HUB_DISABLE_XET=1"
