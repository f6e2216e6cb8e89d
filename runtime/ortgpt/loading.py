"""Load a bundle that generates text: what its generator needs is imported while the bundle opens."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ortgpt.contract import Task
from ortgpt.errors import OptionError
from ortgpt.native_call import native_call
from ortgpt.opening import open_session

if TYPE_CHECKING:
    from ortgpt.generator import Generator


PREFILLS = ("auto", "exact", "fast")  # how long prompts are computed


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    threads: int | None = None,
    verify: str = "sha256",
    prefill: str = "auto",
    reload_after_fork: bool = False,
) -> Generator:
    """Load a bundle folder, or the built-in bundle "austen". Use the result as a context manager, or close() it.

    `device` is "auto", "cpu", "cuda" or "cuda:N". `threads` is the number of CPU threads of one operator, by default
    the CPUs that this process may use. `verify` is "sha256", which reads every file while the model opens, or "size".
    `prefill` says how prompts of 32 or more tokens are computed. "fast" uses a bundle's graph for prompts, which takes
    half the time and rounds a little differently. It is opened at the first such prompt, which waits for it, and takes
    up to two bytes for each weight of the layers. "exact" computes prompts as steps are. "auto" is "fast" where the
    bundle has such a graph: int8 and int4, on the CPU.
    A folder named like a built-in bundle wins over it. A forked child cannot use the generator, which raises
    ClosedError there; with `reload_after_fork`, the child opens the bundle again at its first call, on the CPU only.
    Raises BundleError, DeviceError or OptionError.
    """
    if not isinstance(reload_after_fork, bool):
        raise OptionError.bad_value("reload_after_fork", reload_after_fork, "True, False")
    if prefill not in PREFILLS:
        raise OptionError.bad_value("prefill", prefill, ", ".join(PREFILLS))
    opened = open_session(
        path,
        (Task.TEXT_GENERATION,),
        device=device,
        threads=threads,
        verify=verify,
        meanwhile=_import_generator,
    )
    from ortgpt.generator import serve
    from ortgpt.model import make_parts, open_parts

    opening = partial(open_parts, path, device=device, threads=threads, verify=verify, prefill=prefill)
    return serve(make_parts(opened, prefill), opening, reload_after_fork)


def _import_generator() -> None:
    with native_call:
        import ortgpt.generator  # noqa: F401
