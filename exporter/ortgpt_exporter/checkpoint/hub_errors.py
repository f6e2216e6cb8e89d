"""What `huggingface_hub` raises, as one line that says what was wrong and what to do. Downloads nothing."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from ortgpt_exporter.errors import ExportError


@contextlib.contextmanager
def one_line_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into an ExportError that says what is wrong and what to do."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except HfHubHTTPError as error:
        raise ExportError(_answer(error, repo_id, revision)) from error
    except (httpx2.LocalProtocolError, UnicodeEncodeError) as error:  # its message would show the token
        raise ExportError(
            "HF_TOKEN has letters that no token has; set it to a token of the hub, or unset it"
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        raise ExportError(
            f"{repo_id} is no folder here, and {constants.ENDPOINT} cannot be reached: {_one_line(cause)}; check the "
            "network and HF_ENDPOINT, or copy the repository here"
        ) from error
    except HFValidationError as error:
        raise ExportError(f"{repo_id!r} is no hub id (accepted: owner/name): {_one_line(error)}") from error
    except ExportError:
        raise
    except ValueError as error:
        raise ExportError(
            f"huggingface_hub cannot use what it was given: {_one_line(error)}; correct HF_ENDPOINT, or unset it"
        ) from error
    except RuntimeError as error:  # of hf_xet
        raise ExportError(
            f"the download of {repo_id} broke: {_one_line(error)}; run it again, or with HF_HUB_DISABLE_XET=1"
        ) from error
    except OSError as error:
        cache = f"the cache {constants.HF_HUB_CACHE}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"no space is left for {repo_id} in {cache}; free some, or set HF_HUB_CACHE to a folder elsewhere"
        elif error.errno is not None:
            text = f"{cache} cannot take {repo_id}: {error.strerror}; set HF_HUB_CACHE to a folder that can"
        else:
            text = f"the download of {repo_id} broke: {_one_line(error)}; run it again: whole files are kept"
        raise ExportError(text) from error


def _answer(error: Any, repo_id: str, revision: str | None) -> str:
    """Return in one line what an error status of the hub means, and what to do."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    url = f"{constants.ENDPOINT}/{repo_id}"
    token = "the token in use has no access" if get_token() else "no token is set"
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated and {token}: ask for access at {url}, then set HF_TOKEN or run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo_id} is no folder here, and {constants.ENDPOINT} shows no such repository ({token}); correct the "
            "name, or set HF_TOKEN if it is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{repo_id} has no revision {revision or constants.DEFAULT_REVISION!r} (accepted: a branch, a tag or a "
            f"commit hash; see {url}/commits)"
        )
    if status in (401, 403):
        return (
            f"{constants.ENDPOINT} refuses {repo_id} with status {status} and {token}; set HF_TOKEN to one that has it"
        )
    if status == 429:
        return f"{constants.ENDPOINT} has had too many requests from here; wait some minutes, or set HF_TOKEN ({token})"
    said = f": {_one_line(error.server_message)}" if error.server_message else ""
    return f"{constants.ENDPOINT} answers {repo_id} with status {status}{said}; try again later"


def _one_line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
