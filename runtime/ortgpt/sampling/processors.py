"""How options change the logits of one row before a token is picked, in the order and meaning of `transformers`.

Each processor changes logits (vocab_size,) in place and sees all ids of the row, the prompt's first. Knows no model and
draws nothing.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from ortgpt.errors import OptionError
from ortgpt.options.resolved import LogitsProcessor, ResolvedOptions
from ortgpt.sampling.warpers import Floats, Ids

_GROWTH = 256  # ids by which the list of those that occurred grows


class Processor(ABC):
    """Changes logits (vocab_size,) in place. From one call to the next, the ids of a row only grow."""

    @abstractmethod
    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        """Change the logits of a row; `ids` are those of prompt and continuation, which begins at `start`."""

    def fork(self) -> Self:
        """Return a processor with the same state for another row; itself, if it has none."""
        return self


def make_processors(options: ResolvedOptions, prompt_ids: Sequence[int]) -> list[Processor]:
    """Return the processors of the options, in the order in which `transformers` applies them.

    A logit bias comes where `transformers` has its sequence bias. Presence and frequency penalties, which it lacks,
    come after the repetition penalty. The caller's own come last, before the temperature.
    """
    processors: list[Processor] = []
    if options.logit_bias:
        processors.append(LogitBias(options.logit_bias))
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(options.repetition_penalty, prompt_ids))
    if options.presence_penalty or options.frequency_penalty:
        processors.append(OccurrencePenalty(options.presence_penalty, options.frequency_penalty))
    if options.no_repeat_ngram_size:
        processors.append(NoRepeatNgram(options.no_repeat_ngram_size))
    if options.bad_words_ids:
        processors.append(NoBadWords(options.bad_words_ids, options.eos_token_ids))
    if options.min_new_tokens:
        processors.append(MinNewTokens(options.min_new_tokens, options.eos_token_ids))
    if options.suppress_tokens:
        processors.append(Suppress(options.suppress_tokens))
    processors += [Custom(each) for each in options.logits_processor]
    return processors


class LogitBias(Processor):
    """Adds a number to the logits of single tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), np.int64)
        self._values = np.array(list(bias.values()), np.float32)

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        logits[self._ids] += self._values


def penalize_repetition(logits: Floats, token_ids: Ids, penalty: float) -> None:
    """Make every id in `token_ids` (no id twice) less likely where `penalty` is above 1, in place.

    Positive logits are divided by `penalty`, negative ones multiplied (Keskar et al. 2019, as `transformers` has it).
    """
    scores = logits[token_ids]
    logits[token_ids] = np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty))


class RepetitionPenalty(Processor):
    """Makes every id of prompt and continuation less likely where `penalty` is above 1."""

    def __init__(self, penalty: float, prompt_ids: Sequence[int]) -> None:
        self.penalty = penalty
        self._seen = set(prompt_ids)
        self._array = np.array(sorted(self._seen), np.int64)  # the ids, with space for more after them
        self._read = len(prompt_ids)

    def seen(self, ids: Sequence[int]) -> Ids:
        """Return the ids that occurred, none twice."""
        for token_id in ids[self._read :]:
            if token_id not in self._seen:
                if len(self._seen) == self._array.size:
                    self._array = np.concatenate((self._array, np.zeros(_GROWTH, np.int64)))
                self._array[len(self._seen)] = token_id
                self._seen.add(token_id)
        self._read = len(ids)
        return self._array[: len(self._seen)]

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        penalize_repetition(logits, self.seen(ids), self.penalty)

    def fork(self) -> Self:
        other = copy.copy(self)
        other._seen, other._array = set(self._seen), self._array.copy()
        return other


class OccurrencePenalty(Processor):
    """Subtracts from the logits of ids generated so far: `presence` once, `frequency` for each time.

    The prompt counts for neither, as in OpenAI's interface.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._counts: dict[int, int] = {}
        self._read = 0

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        for token_id in ids[start + self._read :]:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._read = len(ids) - start
        if self._counts:
            counts = np.array(list(self._counts.values()), np.float32)
            logits[list(self._counts)] -= self._presence + self._frequency * counts

    def fork(self) -> Self:
        other = copy.copy(self)
        other._counts = dict(self._counts)
        return other


class NoRepeatNgram(Processor):
    """Forbids tokens that would complete a sequence of `size` tokens that occurred before."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._read = 0

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        before = self._size - 1
        for place in range(max(self._read, before), len(ids)):
            self._followers.setdefault(tuple(ids[place - before : place]), []).append(ids[place])
        self._read = len(ids)
        if len(ids) >= before:
            logits[self._followers.get(tuple(ids[len(ids) - before :]), [])] = -np.inf

    def fork(self) -> Self:
        other = copy.copy(self)
        other._followers = {before: list(after) for before, after in self._followers.items()}
        return other


class NoBadWords(Processor):
    """Forbids the last token of each sequence where the ones before it have just been written."""

    def __init__(self, sequences: Iterable[Sequence[int]], eos_token_ids: frozenset[int]) -> None:
        kept = [tuple(each) for each in sequences if len(each) > 1 or each[0] not in eos_token_ids]
        self._single = [each[0] for each in kept if len(each) == 1]
        self._longer = [(each[:-1], each[-1]) for each in kept if len(each) > 1]

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        logits[self._single] = -np.inf
        for before, last in self._longer:
            if len(ids) >= len(before) and tuple(ids[len(ids) - len(before) :]) == before:
                logits[last] = -np.inf


class MinNewTokens(Processor):
    """Forbids end-of-text before `count` tokens."""

    def __init__(self, count: int, eos_token_ids: Iterable[int]) -> None:
        self.count = count
        self.forbidden = sorted(eos_token_ids)

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        if len(ids) - start < self.count:
            logits[self.forbidden] = -np.inf


class Suppress(Processor):
    """Makes tokens impossible."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._ids = list(token_ids)

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        logits[self._ids] = -np.inf


class Custom(Processor):
    """The caller's own function of all ids, int64 (tokens,), and logits, float32 (vocab_size,), to new logits."""

    def __init__(self, function: LogitsProcessor) -> None:
        self._function = function

    def __call__(self, logits: Floats, ids: Sequence[int], start: int) -> None:
        returned = np.asarray(self._function(np.array(ids, np.int64), logits))
        if returned.shape != logits.shape or not np.issubdtype(returned.dtype, np.floating):
            raise OptionError(
                f"logits_processor returned {returned.dtype} of shape {returned.shape} (accepted: floats of shape "
                f"{logits.shape})"
            )
        with np.errstate(over="ignore"):
            logits[...] = returned
        if np.isnan(logits).any() or np.isposinf(logits).any():
            raise OptionError(
                "logits_processor returned NaN, infinity or more than a float32 holds (accepted: numbers, and -inf to "
                "forbid)"
            )
