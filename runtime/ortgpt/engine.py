"""From token ids to token ids: prefill, one step a token, stop. Knows no text and draws no samples itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ortgpt.bundle import ModelConfig
from ortgpt.cache import Cache, FixedCache, new_cache
from ortgpt.call import Call, Logits, new_call
from ortgpt.errors import ContextLengthError, NonFiniteLogitsError
from ortgpt.prefill import LEAST_TOKENS, Prefill
from ortgpt.selector import Selector, SelectorCall
from ortgpt.session import Session

Active = Sequence[int]  # indices of the rows that go on


class Pick(Protocol):
    """Picks a row's next token, from all its logits or from enough of the largest; see `picker.Picker`."""

    @property
    def count(self) -> int | None: ...
    @property
    def penalty(self) -> float: ...
    def penalized_ids(self, new_ids: Sequence[int]) -> npt.NDArray[np.int64]: ...
    def __call__(self, logits: Logits, new_ids: Sequence[int]) -> int: ...
    def among(self, ids: npt.NDArray[np.int64], logits: Logits, new_ids: Sequence[int]) -> int: ...


@dataclass(kw_only=True)
class Row:
    """One sequence of a batch: its prompt, its limits, and how its next token is picked.

    `pick` gets the logits (vocab_size,), which it may change, or the largest of them, and the ids generated so far.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    pick: Pick
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Timings:
    """Wall time of one call in seconds: checking and encoding the prompt, prefill, and the steps after it."""

    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Engine:
    """Run one open graph. Holds no state of a generation: several threads may use it at once."""

    def __init__(
        self,
        session: Session,
        config: ModelConfig,
        *,
        masked_tokens: int = 0,
        prefill: Prefill | None = None,
        selector: Selector | None = None,
    ) -> None:
        self.session = session
        self.config = config
        self.prefill_graph = prefill
        self.selector = selector
        self.allowed_vocab_size = config.vocab_size - masked_tokens

    def new_cache(self, batch_size: int, tokens: int) -> Cache:
        """Make an empty cache for `batch_size` rows of at most `tokens` tokens."""
        return new_cache(
            self.session,
            n_layer=self.config.n_layer,
            n_head=self.config.n_head,
            batch_size=batch_size,
            tokens=tokens,
        )

    def new_call(self, cache: Cache, *, sequence_length: int = 1, logit_count: int = 1) -> Call:
        """Make a call of this shape over `cache`; by default a decode step."""
        many = cache.batch_size * sequence_length >= LEAST_TOKENS and sequence_length > 1
        session = self.prefill_graph.session() if self.prefill_graph and many else self.session
        return new_call(session, self.config, cache, sequence_length=sequence_length, logit_count=logit_count)

    def check_context(self, rows: Sequence[Row]) -> None:
        """Raise ContextLengthError, with the numbers, when prompt and new tokens of a row exceed the context."""
        n_positions = self.config.n_positions
        for index, row in enumerate(rows):
            prompt, new = len(row.prompt_ids), row.max_new_tokens
            if prompt + new > n_positions:
                fit = f"at most {n_positions - prompt} new tokens fit" if prompt < n_positions else "shorten the prompt"
                raise ContextLengthError(
                    f"row {index}: a prompt of {prompt} tokens and {new} new ones exceed the context of {n_positions} "
                    f"tokens; {fit}"
                )

    def generate(self, rows: Sequence[Row], timings: Timings | None = None) -> Iterator[list[int]]:
        """Generate into `rows`; after each step yield the indices of the rows that gained a token.

        A row ends at one of its `eos_token_ids`, at `max_new_tokens`, or when the caller sets its `finish_reason`
        between steps. A step reads every weight once for the whole batch. Raises ContextLengthError at the call, before
        any work, when a row cannot fit; NonFiniteLogitsError when the model computes NaN or infinity; EngineError when
        ONNX Runtime fails.
        """
        self.check_context(rows)
        return self._steps(rows, Timings() if timings is None else timings)

    def _steps(self, rows: Sequence[Row], timings: Timings) -> Iterator[list[int]]:
        started = time.perf_counter()
        tokens = max(len(row.prompt_ids) + row.max_new_tokens - 1 for row in rows)  # the last token is never fed back
        cache = self.new_cache(len(rows), tokens)
        call = self._prefill_call(cache, [row.prompt_ids for row in rows])
        timings.prefill_s = time.perf_counter() - started
        step_call = self.new_call(cache)
        select = None if self.selector is None else self.selector.new_call(len(rows))
        lengths = cache.lengths.copy()
        active = list(range(len(rows)))
        for step in range(max(row.max_new_tokens for row in rows)):
            for index, token_id in zip(active, self._pick(call, select, rows, active, step), strict=True):
                _extend(rows[index], token_id)
            timings.decode_s = time.perf_counter() - started - timings.prefill_s
            yield active
            active = [index for index in active if rows[index].finish_reason is None]
            if not active:
                return
            call = step_call
            for index in active:
                call.input_ids[index, 0] = rows[index].token_ids[-1]
                lengths[index] += 1
            # A finished row goes on computing in its last slot; its length, and so the batch's, no longer grows.
            call.run(lengths)

    def _pick(
        self, call: Call, select: SelectorCall | None, rows: Sequence[Row], active: Active, step: int
    ) -> list[int]:
        """Return the next token of each active row; on the device that has the logits, where a few decide."""
        counts = [rows[index].pick.count for index in active]
        if select is not None and self.selector is not None and all(n and n <= self.selector.count for n in counts):
            return self._select(call, select, rows, active, step)
        logits = call.logits()[:, 0]
        return [self._pick_of_all(logits[index], rows[index], index, step) for index in active]

    def _pick_of_all(self, logits: Logits, row: Row, index: int, step: int) -> int:
        if not (np.isfinite(logits.max()) and np.isfinite(logits.min())):
            raise NonFiniteLogitsError(
                f"{np.count_nonzero(~np.isfinite(logits))} of {logits.size} logits are not finite at step {step} of "
                f"row {index}; the weights are damaged, or overflow in this precision"
            )
        logits[self.allowed_vocab_size :] = -np.inf
        return row.pick(logits, row.token_ids)

    def _select(self, call: Call, select: SelectorCall, rows: Sequence[Row], active: Active, step: int) -> list[int]:
        penalized, penalties = [np.zeros(0, np.int64)] * len(rows), [1.0] * len(rows)
        for index in active:
            pick = rows[index].pick
            penalized[index], penalties[index] = pick.penalized_ids(rows[index].token_ids), pick.penalty
        logits, ids, non_finite = select.run(call.device_logits, penalized, penalties)
        chosen = []
        for index in active:
            row, count = rows[index], rows[index].pick.count
            assert count is not None
            # With equals beyond the last one that decides, more would have to be looked at than came back.
            whole = logits.shape[1] == self.allowed_vocab_size or logits[index, -1] < logits[index, count - 1]
            if whole and not np.isnan(non_finite[index]):
                chosen.append(row.pick.among(ids[index], logits[index], row.token_ids))
            else:
                chosen.append(self._pick_of_all(call.logits()[index, 0], row, index, step))
        return chosen

    def prefill(
        self,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        logit_positions: npt.NDArray[np.int64] | None = None,
    ) -> Logits:
        """Append each prompt to its row and return logits (batch_size, logit_count, vocab_size).

        Prompts are padded on the right. Logits are those of each row's last token unless `logit_positions`, int64
        (batch_size, logit_count), names places counted from each prompt's start. Where the cache does not take several
        tokens for all rows at once, they are served in turn.
        """
        if isinstance(cache, FixedCache) and not cache.takes_several_tokens:
            positions = [None] * len(prompts) if logit_positions is None else [row[None] for row in logit_positions]
            return np.concatenate([self.prefill(cache.row(i), [ids], positions[i]) for i, ids in enumerate(prompts)])
        return self._prefill_call(cache, prompts, logit_positions).logits()

    def _prefill_call(
        self,
        cache: Cache,
        prompts: Sequence[Sequence[int]],
        logit_positions: npt.NDArray[np.int64] | None = None,
    ) -> Call:
        counts = np.array([len(ids) for ids in prompts], np.int32)
        seq = int(counts.max())
        if isinstance(cache, FixedCache) and seq > 1 and not cache.lengths.any():
            # The fused attention takes the queries in blocks and multiplies a block of one by a routine that rounds
            # differently; with an even count none is left alone, and a row equals its solo run to the bit.
            seq += seq % 2
        places = counts[:, None].astype(np.int64) - 1 if logit_positions is None else logit_positions
        call = self.new_call(cache, sequence_length=seq, logit_count=int(places.shape[1]))
        for row, ids in enumerate(prompts):
            call.input_ids[row, : len(ids)] = ids
        call.logit_positions[...] = places
        call.run(cache.lengths + counts, total=int(cache.lengths.max()) + seq)
        return call


def _extend(row: Row, token_id: int) -> None:
    """Give a row its next token, and note whether it was the last."""
    row.token_ids.append(token_id)
    if token_id in row.eos_token_ids:
        row.finish_reason, row.stop_reason = "stop", token_id
    elif len(row.token_ids) >= row.max_new_tokens:
        row.finish_reason = "length"
