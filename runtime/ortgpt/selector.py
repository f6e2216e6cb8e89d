"""The best logits of each row, picked on the device that computed them: a few numbers come back, not a vocabulary.

For bundles that have a selector graph, those for a GPU. Knows no option but a repetition penalty, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle import Bundle
from ortgpt.call import run_bound
from ortgpt.contract import SELECTED, Flavour, Role, Tensor
from ortgpt.session import Session, open_graph

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_ROUND_TO = 64  # penalised ids; keeps the number of different shapes small


def open_selector(bundle: Bundle, session: Session) -> Selector | None:
    """Open the selector made for the graph of `session`, on its device; None where the bundle has none."""
    for graph in bundle.manifest.graphs:
        made_for = (Role.SELECTOR, Flavour.NATIVE, session.graph.flavour, session.graph.target)
        if (graph.role, graph.flavour, graph.flavour, graph.target) == made_for:
            allowed = bundle.config.vocab_size - bundle.manifest.masked_tokens
            return Selector(open_graph(bundle, graph, session.device, threads=session.threads), allowed)
    return None


class Selector:
    """An open selector graph. Holds no state: several threads may use it at once."""

    def __init__(self, session: Session, allowed_vocab_size: int) -> None:
        self.session = session
        self.allowed_vocab_size = allowed_vocab_size
        self.count = min(SELECTED, allowed_vocab_size)

    def run(self, logits: Any, penalized: Sequence[Ids], penalties: Sequence[float]) -> tuple[Floats, Ids, Floats]:
        """Return the `count` largest of each row, largest first, their ids, and NaN for rows that are not finite.

        `logits` is an OrtValue (batch_size, 1, vocab_size); `penalized` has the ids that a row's penalty lowers, none
        if the penalty is 1. Raises EngineError when ONNX Runtime fails.
        """
        longest = max(1, *(len(ids) for ids in penalized))
        padded = np.zeros((len(penalized), -(-longest // _ROUND_TO) * _ROUND_TO), np.int64)
        for row, ids in zip(padded, penalized, strict=True):
            row[:] = ids[0] if len(ids) else 0  # the same id twice gets the same value twice
            row[: len(ids)] = ids
        binding = self.session.handle.io_binding()
        binding.bind_ortvalue_input(Tensor.LOGITS, logits)
        binding.bind_cpu_input(Tensor.PENALIZED_IDS, padded)
        binding.bind_cpu_input(Tensor.PENALTIES, np.array(penalties, np.float32)[:, None])
        for name in (Tensor.TOP_LOGITS, Tensor.TOP_IDS, Tensor.NON_FINITE):
            binding.bind_output(name)
        run_bound(self.session, binding)
        top_logits, top_ids, non_finite = (value.numpy() for value in binding.get_outputs())
        return top_logits, top_ids, non_finite
