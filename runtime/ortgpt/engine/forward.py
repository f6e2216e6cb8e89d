"""One run of a graph for a fixed shape: its arrays, made and bound once where the graph allows it. Picks no token.

The two flavours have different inputs. For both, write `input_ids` and `logit_positions`, run, and take the logits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.model_config import ModelConfig
from ortgpt.contract import DType, Tensor, past_names, present_names
from ortgpt.engine.kv_cache import FixedCache, GrowingCache, Lengths
from ortgpt.errors import EngineError
from ortgpt.native_call import native_call
from ortgpt.ort.package import comes_from_onnxruntime
from ortgpt.ort.session import Session

Logits = npt.NDArray[np.float32]
HiddenStates = npt.NDArray[np.float32]


class Forward(Protocol):
    """Several new tokens for each row, after those that a cache holds.

    `input_ids` is int64 (batch_size, sequence_length). `logit_positions`, int64 (batch_size, logit_count), names
    positions within it, and may not change after the first run. A run leaves the logits on the device.
    """

    input_ids: npt.NDArray[np.int64]
    logit_positions: npt.NDArray[np.int64]
    device_logits: Any  # OrtValue (batch_size, logit_count, vocab_size); None if the graph computes more logits

    def run(self, lengths: Lengths, *, total: int | None = None) -> None:
        """Run the graph so that row i then holds lengths[i] tokens.

        `total` counts the positions of the longest row, if padding makes that more than its length. Raises EngineError
        when ONNX Runtime fails, ClosedError in a forked process.
        """
        ...

    def logits(self) -> Logits:
        """Return the logits of the last run, float32 (batch_size, logit_count, vocab_size), valid until the next."""
        ...


class _Positions:
    """The positions of the new tokens: each row continues from its length."""

    def __init__(self, config: ModelConfig, batch: int, sequence_length: int) -> None:
        self.array = np.zeros((batch, sequence_length), np.int64)
        self._offsets = np.arange(sequence_length, dtype=np.int64)
        self._last = config.n_positions - 1

    def set(self, lengths: Lengths) -> None:
        # Padding beyond n_positions is computed at the last position and thrown away.
        np.add(lengths[:, None], self._offsets, out=self.array)
        np.minimum(self.array, self._last, out=self.array)


class _BoundForward:
    """Everything is bound once; a run writes a few integers, which are copied to a GPU.

    `output`, float32 (batch_size, count, width), is the only result beside the cache. `logit_rows` are the places of
    `logit_positions` whose logits the head computes.
    """

    def __init__(
        self,
        session: Session,
        config: ModelConfig,
        cache: FixedCache,
        sequence_length: int,
        count: int,
        *,
        output: str,
        width: int,
        logit_rows: npt.NDArray[np.int64],
    ) -> None:
        batch = cache.batch_size
        self.cache = cache
        self.input_ids = np.zeros((batch, sequence_length), np.int64)
        self.logit_positions = np.zeros((batch, count), np.int64)
        shape = (batch, count, width)
        self._result = np.empty(shape, np.float32) if session.device.is_cpu else None
        self._device_result: Any = (
            session.empty(shape, DType.FLOAT32) if self._result is None else session.share(self._result)
        )
        self._logit_rows = logit_rows
        self._positions = _Positions(config, batch, sequence_length)
        self._seqlens_k = np.zeros(batch, np.int32)
        self._total = np.zeros((), np.int32)
        self._session = session
        self._binding: Any = session.handle.io_binding()
        self._sent: list[tuple[Any, npt.NDArray[Any]]] = []  # what is copied to a GPU before each run
        self._sent_once: list[tuple[Any, npt.NDArray[Any]]] = []
        self._bind(config.n_layer, output)

    def _bind(self, n_layer: int, output: str) -> None:
        session, bind_input = self._session, self._binding.bind_ortvalue_input
        for past, present, value in zip(past_names(n_layer), present_names(n_layer), self.cache.values, strict=True):
            bind_input(past, value)
            self._binding.bind_ortvalue_output(present, value)
        for name, array in (
            (Tensor.INPUT_IDS, self.input_ids),
            (Tensor.POSITION_IDS, self._positions.array),
            (Tensor.SEQLENS_K, self._seqlens_k),
            (Tensor.LOGIT_POSITIONS, self.logit_positions),
        ):
            if session.device.is_cpu:
                bind_input(name, session.share(array))
            else:
                value = session.copy_in(array)
                (self._sent_once if name == Tensor.LOGIT_POSITIONS else self._sent).append((value, array))
                bind_input(name, value)
        if session.graph.has_hidden_states:  # otherwise every position gets logits
            bind_input(Tensor.LOGIT_ROWS, session.copy_in(self._logit_rows))
        bind_input(Tensor.TOTAL_SEQUENCE_LENGTH, session.share(self._total))  # read on the CPU, on any device
        self._binding.bind_ortvalue_output(output, self._device_result)

    def run(self, lengths: Lengths, *, total: int | None = None) -> None:
        self._positions.set(self.cache.lengths)
        np.subtract(lengths, 1, out=self._seqlens_k)
        self._total[...] = int(lengths.max()) if total is None else total
        for value, array in (*self._sent, *self._sent_once):
            value.update_inplace(array)
        self._sent_once.clear()
        run_bound(self._session, self._binding)
        self.cache.lengths[...] = lengths

    def _fetched(self) -> npt.NDArray[np.float32]:
        fetched: npt.NDArray[np.float32] = self._device_result.numpy() if self._result is None else self._result
        return fetched


class NativeForward(_BoundForward):
    """Compute logits (batch_size, logit_count, vocab_size)."""

    def __init__(
        self, session: Session, config: ModelConfig, cache: FixedCache, sequence_length: int, logit_count: int
    ) -> None:
        super().__init__(
            session, config, cache, sequence_length, logit_count,
            output=Tensor.LOGITS, width=config.vocab_size, logit_rows=np.arange(logit_count, dtype=np.int64),
        )  # fmt: skip
        self.device_logits = self._device_result

    def logits(self) -> Logits:
        return self._fetched()


class HiddenForward(_BoundForward):
    """Compute hidden states (batch_size, count, n_embd). The head multiplies nothing, since no row is to get logits."""

    def __init__(
        self, session: Session, config: ModelConfig, cache: FixedCache, sequence_length: int, count: int
    ) -> None:
        # ONNX Runtime always runs the whole graph: only_execute_path_to_fetches works in its training builds alone.
        # On a GPU one row gets logits, since not every kernel there takes a product without rows.
        logit_rows = np.zeros(0 if session.device.is_cpu else 1, np.int64)
        super().__init__(
            session, config, cache, sequence_length, count,
            output=Tensor.HIDDEN_STATES, width=config.n_embd, logit_rows=logit_rows,
        )  # fmt: skip

    def hidden_states(self) -> HiddenStates:
        """Return the hidden states of the last run, float32 (batch_size, count, n_embd)."""
        return self._fetched()


class PortableForward:
    """The cache that a run returns is bound as the past of the next. The graph computes logits of every position."""

    def __init__(
        self, session: Session, config: ModelConfig, cache: GrowingCache, sequence_length: int, logit_count: int
    ) -> None:
        batch = cache.batch_size
        self.cache = cache
        self.input_ids = np.zeros((batch, sequence_length), np.int64)
        self.logit_positions = np.zeros((batch, logit_count), np.int64)
        self._positions = _Positions(config, batch, sequence_length)
        self._offsets = np.arange(sequence_length)
        self._session = session
        self._pasts, self._presents = past_names(config.n_layer), present_names(config.n_layer)
        self._all_logits: Any = None
        self.device_logits = None

    def run(self, lengths: Lengths, *, total: int | None = None) -> None:
        session = self._session
        self._positions.set(self.cache.lengths)
        gained = (self._offsets < (lengths - self.cache.lengths)[:, None]).astype(np.int64)  # padding counts nothing
        mask = np.concatenate((self.cache.mask, gained), axis=1)
        binding = session.handle.io_binding()
        binding.bind_cpu_input(Tensor.INPUT_IDS, self.input_ids)
        binding.bind_cpu_input(Tensor.ATTENTION_MASK, mask)
        binding.bind_cpu_input(Tensor.POSITION_IDS, self._positions.array)
        binding.bind_output(Tensor.LOGITS)
        for past, present, value in zip(self._pasts, self._presents, self.cache.values, strict=True):
            binding.bind_ortvalue_input(past, value)
            binding.bind_output(present)
        run_bound(session, binding)
        self._all_logits, *self.cache.values = binding.get_outputs()
        self.cache.mask = mask
        self.cache.lengths[...] = lengths

    def logits(self) -> Logits:
        chosen: Logits = np.take_along_axis(self._all_logits.numpy(), self.logit_positions[:, :, None], axis=1)
        return chosen


def run_bound(session: Session, binding: Any) -> None:
    """Run a graph on what is bound. Raises EngineError when ONNX Runtime fails, ClosedError in a forked process."""
    run = session.handle.run_with_iobinding
    try:
        with native_call:
            run(binding)
    except Exception as error:
        if not comes_from_onnxruntime(error):
            raise
        raise EngineError(f"ONNX Runtime failed while running the graph: {error}") from error
