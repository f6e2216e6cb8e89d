"""The second graph that a bundle may have for prompts: the decoder's function, faster for many tokens at once.

It has the decoder's tensors and works on the same cache. The first prompt that it is to compute opens it, and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import GraphSpec
from ortgpt.contract import Role
from ortgpt.errors import BundleError
from ortgpt.forks import ProcessLock
from ortgpt.ort.session import Session, open_graph

_ROLES = (Role.PROMPT, Role.PREFILL)
MIN_TOKENS = 32  # of a row; with fewer, the decoder wins, whose weights are half the bytes


class PrefillGraph:
    """A graph that is opened once, when it is first needed. Safe to use from several threads."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self._open = open_session
        self._lock = ProcessLock()
        self._session: Session | None = None

    def session(self) -> Session:
        """Return the open graph. Raises as open_graph() does."""
        with self._lock.here():
            if self._session is None:
                self._session = self._open()
            return self._session


def _kind(graph: GraphSpec) -> tuple[object, ...]:
    return graph.flavour, graph.target, graph.cache, graph.outputs


def find_prefill_graph(bundle: Bundle, session: Session, prefill: str = "auto") -> PrefillGraph | None:
    """Return the graph for prompts that was made beside the graph of `session`; None where the bundle has none.

    With `prefill` "exact" there is none; "fast" raises BundleError where the bundle has none.
    """
    for graph in bundle.manifest.graphs:
        if graph.role in _ROLES and _kind(graph) == _kind(session.graph) and prefill != "exact":
            return PrefillGraph(partial(open_graph, bundle, graph, session.device, threads=session.threads))
    if prefill == "fast":
        raise BundleError(
            f'{bundle.path} has no graph for prompts beside its {session.graph} (prefill = "fast"); that one computes '
            "prompts, too: leave prefill out"
        )
    return None
