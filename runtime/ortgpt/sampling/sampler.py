"""How a row picks its next token: its options change the logits, in the order of `transformers`, then it draws.

Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortgpt.errors import OptionError
from ortgpt.options.resolved import ResolvedOptions, Seed
from ortgpt.sampling.grammar import Matcher
from ortgpt.sampling.processors import MinNewTokens, RepetitionPenalty, make_processors
from ortgpt.sampling.warpers import Floats, Ids, candidates, draw, greedy

NOTHING_LEFT = (
    "the options leave no token to pick: bad_words, suppress_tokens, no_repeat_ngram_size, min_new_tokens, a grammar "
    "or a logits_processor forbid all of them"
)


class Sampler:
    """Picks from the logits of the whole vocabulary, or from enough of the largest after the repetition penalty.

    Holds the state of one row: which ids it has, and its random numbers, of which each pick takes one. `ids` are those
    of prompt and continuation; from one pick to the next they only grow.
    """

    def __init__(
        self, options: ResolvedOptions, prompt_ids: Sequence[int], seed: Seed, grammar: Matcher | None = None
    ) -> None:
        self._options = options
        self.rng = np.random.default_rng(seed) if options.do_sample else None
        self._start = len(prompt_ids)
        self._processors = make_processors(options, prompt_ids)
        self._grammar = grammar
        self._repetition: RepetitionPenalty | None = None
        self._minimum: MinNewTokens | None = None
        for each in self._processors:
            if isinstance(each, RepetitionPenalty):
                self._repetition = each
            elif isinstance(each, MinNewTokens):
                self._minimum = each
        self._forbids = bool(self._processors) or grammar is not None
        known = (self._repetition is not None) + (self._minimum is not None)
        self._few_decide = len(self._processors) == known and grammar is None

    @property
    def penalty(self) -> float:
        """The repetition penalty: positive logits of ids that occurred are divided by it, negative ones multiplied."""
        return self._options.repetition_penalty

    def penalized_ids(self, ids: Sequence[int]) -> Ids:
        """Return the ids that occurred in prompt and continuation, each once; without a penalty, an empty array."""
        return np.zeros(0, np.int64) if self._repetition is None else self._repetition.seen(ids)

    @property
    def top_count(self) -> int | None:
        """How many of the largest logits decide the pick; None if all do."""
        if not self._few_decide:
            return None
        forbidden = 0 if self._minimum is None else len(self._minimum.forbidden)
        if self.rng is None:
            return 1 + forbidden
        return self._options.top_k + forbidden if self._options.top_k else None

    def pick(self, logits: Floats, ids: Sequence[int]) -> int:
        """Pick from the logits of all ids (vocab_size,), which are changed.

        Raises OptionError when the options leave no token.
        """
        for processor in self._processors:
            processor(logits, ids, self._start)
        if self._grammar is not None:
            self._grammar.mask(logits)
        return self._pick_processed(logits)

    def pick_from_top(self, top_ids: Ids, logits: Floats, ids: Sequence[int]) -> int:
        """Pick from the largest logits after the penalty, at least `top_count` of them, and their ids `top_ids`."""
        if self._minimum is not None and len(ids) - self._start < self._minimum.count:
            logits = np.where(np.isin(top_ids, self._minimum.forbidden), np.float32(-np.inf), logits)
        return int(top_ids[self._pick_processed(logits)])

    def _pick_processed(self, logits: Floats) -> int:
        if self._forbids and logits.max() == -np.inf:
            raise OptionError(NOTHING_LEFT)
        if self.rng is None:
            return greedy(logits)
        options = self._options
        ids, weights = candidates(
            logits,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            typical_p=options.typical_p,
        )
        return draw(ids, weights, self.rng)
