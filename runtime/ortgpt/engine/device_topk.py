"""The largest logits of each row, found on the device that computed them: few numbers come back, not a vocabulary.

Bundles for a GPU have a graph for it. Knows no option but a repetition penalty, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.folder import Bundle
from ortgpt.contract import DEVICE_TOP_K, Role, Tensor
from ortgpt.engine.forward import run_bound
from ortgpt.ort.session import Session, open_graph

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_ROUND_TO = 64  # penalised ids; keeps the number of different shapes small


def open_device_topk(bundle: Bundle, session: Session) -> DeviceTopK | None:
    """Open the top-k graph made for the graph of `session`, on its device; None if the bundle has none."""
    for graph in bundle.manifest.graphs:
        if (graph.role, graph.target) == (Role.SELECTOR, session.graph.target):
            allowed = bundle.config.vocab_size - bundle.manifest.masked_tokens
            return DeviceTopK(open_graph(bundle, graph, session.device, threads=session.threads), allowed)
    return None


class DeviceTopK:
    """An open top-k graph. Holds no state of a generation: several threads may use it at once."""

    def __init__(self, session: Session, allowed_vocab_size: int) -> None:
        self.session = session
        self.allowed_vocab_size = allowed_vocab_size
        self.count = min(DEVICE_TOP_K, allowed_vocab_size)

    def new_forward(self, batch_size: int) -> TopKForward:
        """Make a forward for batches of this size."""
        return TopKForward(self.session, batch_size)


class TopKForward:
    """The arrays of a batch, bound once; ids are bound again only where a penalty needs them."""

    def __init__(self, session: Session, batch_size: int) -> None:
        self._session = session
        self._binding: Any = session.handle.io_binding()
        self._penalized = np.zeros((batch_size, 1), np.int64)
        self._penalties = np.ones((batch_size, 1), np.float32)
        self._binding.bind_cpu_input(Tensor.PENALIZED_IDS, self._penalized)
        self._binding.bind_cpu_input(Tensor.PENALTIES, self._penalties)
        for name in (Tensor.TOP_LOGITS, Tensor.TOP_IDS, Tensor.NON_FINITE):
            self._binding.bind_output(name)

    def run(self, logits: Any, penalized: Sequence[Ids], penalties: Sequence[float]) -> tuple[Floats, Ids, Floats]:
        """Return the largest logits of each row, largest first, their ids, and NaN for rows that are not finite.

        `logits` is an OrtValue (batch_size, 1, vocab_size); `penalized` has the ids that a row's penalty lowers, none
        if the penalty is 1. Of equal logits the lowest id comes first. Raises EngineError when ONNX Runtime fails.
        """
        self._binding.bind_ortvalue_input(Tensor.LOGITS, logits)
        if any(map(len, penalized)):
            self._bind_penalized(penalized, penalties)
        run_bound(self._session, self._binding)
        top_logits, top_ids, non_finite = (value.numpy() for value in self._binding.get_outputs())
        # A GPU has an order of its own among equals.
        order = np.lexsort((top_ids, -top_logits))
        return np.take_along_axis(top_logits, order, 1), np.take_along_axis(top_ids, order, 1), non_finite

    def _bind_penalized(self, penalized: Sequence[Ids], penalties: Sequence[float]) -> None:
        width = -(-max(map(len, penalized)) // _ROUND_TO) * _ROUND_TO
        if self._penalized.shape[1] != width:
            self._penalized = np.zeros((len(penalized), width), np.int64)
        for row, ids in zip(self._penalized, penalized, strict=True):
            row[:] = ids[0] if len(ids) else 0  # the same id twice gets the same value twice
            row[: len(ids)] = ids
        self._penalties[:, 0] = penalties
        self._binding.bind_cpu_input(Tensor.PENALIZED_IDS, self._penalized)
        self._binding.bind_cpu_input(Tensor.PENALTIES, self._penalties)
