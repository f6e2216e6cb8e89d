"""What a classifier reads: a text, a pair of texts, or a context with choices, as rows of token ids. Knows no graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, cast

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import PairTemplate, Template
from ortgpt.contract import FineTuning, Task, TokenizerKind
from ortgpt.errors import ContextLengthError, PromptError, shown
from ortgpt.model import Prompt, prompt_ids
from ortgpt.text.tokenizer import Tokenizer

ClassifierPrompt = Prompt | tuple[str, str]
"""A text, its token ids, or a pair of texts."""

_OF_PAIRS = (FineTuning.ENTAILMENT, FineTuning.SIMILARITY)
# What a message says is accepted: in Python, on the command line, and as a row of a file.
_TEXT = 'a text, a row with "text", or token ids'
_PAIR = 'a pair of texts: a tuple, --pair, or a row with "text" and "text_pair"'
_CHOICES = 'a context with choices: choose(), or a row with "context" and "choices"'


@dataclass(frozen=True, kw_only=True)
class ClassifierInput:
    """One thing to classify, as the model reads it."""

    name: str
    """What a message calls it."""
    rows: list[list[int]]
    """The ids of each row to compute: one, both orders of a pair, or one for each choice."""
    cut: int = 0
    """How many tokens were cut, so that it fits the context."""
    text: str | None = None
    """The text, if it is a single one."""
    places: range = field(default_factory=lambda: range(0))
    """The places of the text's own tokens in its row, without those around them."""
    choices: tuple[str, ...] = ()
    """The choices, if it is a context with choices."""


class InputReader:
    """Turns what a caller gives into rows of ids, in the form that the classifier was trained on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: Template | None,
        finetuning_task: str | None,
        labels_tokens: bool,
        limit: int,
        n_positions: int,
        cuts: bool = False,
    ) -> None:
        """Read for a model of `limit` ids and `n_positions`; with `cuts`, cut what is longer, else refuse it.

        A text loses its end, as does the longer one of a pair; a context with choices loses its beginning.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._finetuning_task = finetuning_task
        self._labels_tokens = labels_tokens
        self._limit = limit
        self._n_positions = n_positions
        self._cuts = cuts

    @classmethod
    def of_bundle(cls, bundle: Bundle, tokenizer: Tokenizer, *, cuts: bool = False) -> InputReader:
        """Read for a bundle."""
        assert bundle.labels is not None, "the bundle of a classifier has labels"
        return cls(
            tokenizer,
            template=bundle.manifest.tokenizer.template,
            finetuning_task=bundle.labels.finetuning_task,
            labels_tokens=bundle.manifest.task == Task.TOKEN_CLASSIFICATION,
            limit=bundle.config.vocab_size - bundle.manifest.masked_tokens,
            n_positions=bundle.config.n_positions,
            cuts=cuts,
        )

    def read(self, text: ClassifierPrompt, name: str) -> ClassifierInput:
        """Read a text, its ids or a pair of texts, which messages call `name`.

        Raises PromptError for another value, an empty one, or one of the other form; ContextLengthError.
        """
        task = self._finetuning_task
        if task == FineTuning.MULTIPLE_CHOICE:
            raise PromptError(
                f"{name} = {shown(text)} has no choices, and the task {task} ranks choices (accepted: {_CHOICES})"
            )
        if is_pair(text):
            return self._checked(name, *self._pair_rows(*text, name))
        if task == FineTuning.SIMILARITY or (task in _OF_PAIRS and isinstance(text, str)):
            raise PromptError(
                f"{name} = {shown(text)} is not a pair, and the task {task} reads pairs (accepted: {_PAIR})"
            )
        ids = prompt_ids(cast(Prompt, text), self._tokenizer, self._limit, name)  # a pair is not one, which mypy misses
        if not isinstance(text, str):
            return self._checked(name, [ids])
        if self._template is not None:
            (ids,), cut = self._cut([ids], len(self._template.surround([])))
            begin, row = len(self._template.before), self._template.surround(ids)
        elif self._tokenizer.kind == TokenizerKind.TOKENIZER_JSON:
            begin, row = 0, self._tokenizer.encode_surrounded(text)
            (row,), cut = self._cut([row], 0)
        else:
            (ids,), cut = self._cut([ids], 0)
            begin, row = 0, ids
        return self._checked(name, [row], cut, text=text, places=range(begin, begin + len(ids)))

    def read_choices(self, context: str, choices: Iterable[str], name: str) -> ClassifierInput:
        """Read a context and its choices, which messages call `name`; raises as read() does."""
        if self._finetuning_task != FineTuning.MULTIPLE_CHOICE:
            accepted = _PAIR if self._finetuning_task in _OF_PAIRS else _TEXT
            raise PromptError(f"{name} has choices, and what is asked for is a label (accepted: {accepted})")
        if not isinstance(context, str):
            raise PromptError(f"{name}: context = {shown(context)} (accepted: a text)")
        given = [choices] if isinstance(choices, str) or not isinstance(choices, Iterable) else [*choices]
        wrong = [each for each in given if not (isinstance(each, str) and each)]
        if wrong or len(given) < 2:
            value = wrong[0] if wrong else choices
            raise PromptError(
                f"{name}: choices with {shown(value)} (accepted: a list of two or more texts, none empty)"
            )
        twice = next((each for each in given if given.count(each) > 1), None)
        if twice is not None:
            raise PromptError(f"{name}: {shown(twice)} is among the choices more than once (accepted: different texts)")
        pair = self._pair_template(name)
        first, *others = (prompt_ids(each, self._tokenizer, self._limit, name) for each in (context, *given))
        room = max(0, self._n_positions - len(pair.join([], [])) - max(map(len, others)))
        cut = max(0, len(first) - room) if self._cuts else 0
        rows = [pair.join(first[cut:], each) for each in others]
        return self._checked(name, rows, cut, choices=tuple(given))

    def _pair_rows(self, first: str, second: str, name: str) -> tuple[list[list[int]], int]:
        """Return the rows of a pair of texts, and how many tokens were cut."""
        pair = self._pair_template(name)
        both = [prompt_ids(text, self._tokenizer, self._limit, name) for text in (first, second)]
        (left, right), cut = self._cut(both, len(pair.join([], [])))
        rows = [pair.join(left, right)]
        return [*rows, pair.join(right, left)] if self._finetuning_task == FineTuning.SIMILARITY else rows, cut

    def _pair_template(self, name: str) -> PairTemplate:
        pair = None if self._template is None else self._template.pair
        if pair is None or self._labels_tokens or self._finetuning_task == FineTuning.CLASSIFICATION:
            raise PromptError(f"{name} is a pair, and what gets a label is a single text (accepted: {_TEXT})")
        return pair

    def _cut(self, texts: Sequence[list[int]], around: int) -> tuple[list[list[int]], int]:
        """Return one or two texts without the ends that do not fit beside `around` tokens, and how many those were."""
        room, total = self._n_positions - around, sum(map(len, texts))
        if not self._cuts or total <= room:
            return [*texts], 0
        # The shorter of two is kept whole if it fits into half of the room.
        least = min(min(map(len, texts)), room // 2) if len(texts) == 2 else 0
        keeps = [room - least if len(ids) == max(map(len, texts)) else least for ids in texts]
        if len(texts) == 2 and len(texts[0]) == len(texts[1]):
            keeps = [room - room // 2, room // 2]
        return [ids[: max(0, keep)] for ids, keep in zip(texts, keeps, strict=True)], total - room

    def _checked(
        self, name: str, rows: list[list[int]], cut: int = 0, *, text: str | None = None, places: range = range(0),
        choices: tuple[str, ...] = (),
    ) -> ClassifierInput:  # fmt: skip
        if not all(rows):
            raise PromptError(f"{name} is empty (accepted: at least one token)")
        longest = max(map(len, rows))
        if longest > self._n_positions:
            raise ContextLengthError(
                f"{name} has {longest:,} tokens, more than the model's context of {self._n_positions:,}; shorten it"
            )
        return ClassifierInput(name=name, rows=rows, cut=cut, text=text, places=places, choices=choices)


def is_pair(value: object) -> TypeGuard[tuple[str, str]]:
    """Tell whether a value is a tuple of two texts."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, str) for each in value)
