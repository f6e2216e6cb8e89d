"""How one row picks its next token: the options applied to its logits, in the order of `transformers`, then the draw.

Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortgpt import sampling
from ortgpt.options import ResolvedOptions
from ortgpt.sampling import Floats, Ids

_ROOM = 256  # ids that the list of those that occurred grows by


class Picker:
    """Picks from the logits of the whole vocabulary, or from enough of the largest, penalised already.

    Holds the state of one row: which ids it has, and its random numbers.
    """

    def __init__(self, options: ResolvedOptions, prompt_ids: Sequence[int], seed: int | None) -> None:
        self._options = options
        self._rng = np.random.default_rng(seed) if options.do_sample else None
        self._seen = set(prompt_ids)
        self._penalized = np.array(sorted(self._seen), np.int64)  # with room for more behind them

    @property
    def penalty(self) -> float:
        """What the logits of ids that occurred are divided by, or multiplied with if they are negative."""
        return self._options.repetition_penalty

    def penalized_ids(self, new_ids: Sequence[int]) -> Ids:
        """Return the ids that occurred in prompt and continuation, none twice; none at all without a penalty."""
        if self.penalty == 1.0:
            return self._penalized[:0]
        if new_ids and new_ids[-1] not in self._seen:
            if len(self._seen) == self._penalized.size:
                self._penalized = np.concatenate((self._penalized, np.zeros(_ROOM, np.int64)))
            self._penalized[len(self._seen)] = new_ids[-1]
            self._seen.add(new_ids[-1])
        return self._penalized[: len(self._seen)]

    @property
    def count(self) -> int | None:
        """How many of the largest logits decide the pick; None if all do."""
        forbidden = len(self._options.eos_token_ids) if self._options.min_new_tokens else 0
        if self._rng is None:
            return 1 + forbidden
        return self._options.top_k + forbidden if self._options.top_k else None

    def __call__(self, logits: Floats, new_ids: Sequence[int]) -> int:
        """Pick from the logits of all ids (vocab_size,), which are changed; `new_ids` are those generated so far."""
        if self.penalty != 1.0:
            sampling.penalize_repetition(logits, self.penalized_ids(new_ids), self.penalty)
        if len(new_ids) < self._options.min_new_tokens:
            sampling.forbid(logits, self._options.eos_token_ids)
        return self._pick(logits)

    def among(self, ids: Ids, logits: Floats, new_ids: Sequence[int]) -> int:
        """Pick from the largest logits, at least `count` of them, after the penalty; `ids` says whose they are."""
        if len(new_ids) < self._options.min_new_tokens:
            logits = np.where(np.isin(ids, list(self._options.eos_token_ids)), np.float32(-np.inf), logits)
        return int(ids[self._pick(logits)])

    def _pick(self, logits: Floats) -> int:
        if self._rng is None:
            return sampling.greedy(logits)
        options = self._options
        ids, weights = sampling.candidates(
            logits, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
        )
        return sampling.draw(ids, weights, self._rng)
