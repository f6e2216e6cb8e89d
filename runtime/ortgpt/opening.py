"""Open a bundle: its graph in one thread, its hashes in a second, its tokenizer meanwhile.

Opening the graph takes longest, and releases the GIL. So it begins before all modules are imported that it does not
need, and these are imported meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ortgpt.background import Background
from ortgpt.bundle.folder import Bundle, open_bundle
from ortgpt.contract import TOKENIZER_FILES, PromiseKind, Task
from ortgpt.errors import BundleError, OptionError, OrtGptError
from ortgpt.native_call import native_call
from ortgpt.ort.package import import_onnxruntime, install_hint

if TYPE_CHECKING:
    from ortgpt.ort.session import Session
    from ortgpt.text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


def open_session(
    path: str | os.PathLike[str],
    tasks: Collection[str],
    *,
    device: str,
    threads: int | None,
    verify: str,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[Bundle, Session, Tokenizer]:
    """Open a bundle folder of one of `tasks` as ortgpt.load() describes it: its first graph for the device.

    `meanwhile` is called while the graph opens.
    """
    if verify not in ("sha256", "size"):
        raise OptionError.bad_value("verify", verify, "sha256, size")
    bundle = open_bundle(path)
    _check_task(bundle, tasks)
    stop = threading.Event()
    verify_hashes = partial(_verify_hashes, bundle, None if verify == "sha256" else (), stop)
    with Background(verify_hashes, stop=stop.set, daemon=True) as hashes:
        # With NumPy, in a thread, since Ctrl-C would break the import of either.
        import_onnxruntime(bundle.manifest.minimum_onnxruntime)
        with native_call:
            from ortgpt.ort.session import plan_session
        # What follows keeps the GIL busy, so the part of opening the graph that needs the GIL comes first.
        plan = plan_session(bundle, device=device, threads=threads)
        with Background(plan.open, stop=plan.cancel, daemon=False) as opening:
            meanwhile()
            tokenizer = _read_tokenizer(bundle, verify)
            try:
                session = opening.result()
            except OrtGptError:
                hashes.result()  # names a damaged file instead, if there is one; a good load waits for the hashes, too
                raise
        hashes.result()
    bundle.check_same()
    _check_tokenizer(bundle, tokenizer)
    if bundle.manifest.precision.promise.kind == PromiseKind.BATCH_DEPENDENT:
        _logger.warning(
            "%s is batch_dependent: a row's answer changes with the other rows of its batch, and with the length of a "
            "prompt's pieces; `ortgpt quantize` has recipes without that",
            bundle.path,
        )
    return bundle, session, tokenizer


def _check_task(bundle: Bundle, tasks: Collection[str]) -> None:
    """Raise BundleError, which says what opens the bundle, if its task is another."""
    task = bundle.manifest.task
    if task in tasks:
        return
    if task == Task.TEXT_GENERATION:
        raise BundleError(f"{bundle.path} is a language model; open it with ortgpt.load(), or use `ortgpt generate`")
    raise BundleError(
        f"{bundle.path} is a classifier ({task}); open it with ortgpt.load_classifier(), or use `ortgpt classify`"
    )


def _verify_hashes(bundle: Bundle, names: Iterable[str] | None, stop: threading.Event) -> None:
    try:
        bundle.verify_hashes(names, stop=stop)
    except BundleError:
        bundle.check_same()  # names a file that was replaced meanwhile instead
        raise


def _read_tokenizer(bundle: Bundle, verify: str) -> Tokenizer:
    kind, rows = bundle.manifest.tokenizer.kind, bundle.config.vocab_size - bundle.manifest.masked_tokens
    with native_call:
        from ortgpt.text.open_tokenizer import open_tokenizer
    try:
        return open_tokenizer(bundle.path, kind, rows=rows)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "tokenizers"
        fault = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise BundleError(
            f"{bundle.path}: its tokenizer needs the package tokenizers, which {fault}; {install_hint('tokenizers')}"
        ) from None
    except BundleError:
        if verify == "sha256":  # names a damaged file instead; these are small
            bundle.verify_hashes(TOKENIZER_FILES[kind])
        raise


def _check_tokenizer(bundle: Bundle, tokenizer: Tokenizer) -> None:
    rows, masked = bundle.config.vocab_size, bundle.manifest.masked_tokens
    if rows - masked != tokenizer.vocab_size:
        raise BundleError(
            f"{bundle.path}: the tokenizer has {tokenizer.vocab_size} ids, but the model has {rows} rows of which "
            f"{masked} are masked; export it again"
        )
    template = bundle.manifest.tokenizer.template
    beyond = [] if template is None else [each for each in template.token_ids if each >= rows - masked]
    if beyond:
        raise BundleError(
            f"{bundle.path}: tokenizer.template has the id {max(beyond)} (accepted: 0 to {rows - masked - 1}); "
            "export it again"
        )
