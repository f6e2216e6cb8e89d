"""The face of classifiers: load a bundle, then give texts, pairs or tokens labels, or rank choices.

Holds no state of a call.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from ortgpt.bundle.folder import Bundle
from ortgpt.classifier_input import ClassifierInput, ClassifierPrompt, InputReader
from ortgpt.contract import Flavour, ProblemType, Task, Tensor, TokenizerKind
from ortgpt.decode.next_token import check_finite
from ortgpt.engine.forward import Logits, run_bound
from ortgpt.errors import ClosedError, PromptError, shown
from ortgpt.forks import fork_count
from ortgpt.opening import open_session
from ortgpt.options.validation import integer
from ortgpt.ort.session import Session
from ortgpt.results import Classification, TokenLabel
from ortgpt.sampling.logprobs import log_softmax
from ortgpt.text.tokenizer import Tokenizer

_TASKS = (Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
# Positions that are computed together, unless the call says otherwise. More leave the caches of a CPU, and take more
# padding: 64 texts of 1 to 200 tokens took 1.2 times as long with 1,024, and 1.7 times with 4,096.
_BATCH_TOKENS = 256
_THRESHOLD = 0.5  # of a multi-label probability

_Parts = tuple[Bundle, Session, Tokenizer]


def load_classifier(
    path: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None, verify: str = "sha256"
) -> Classifier:
    """Load the bundle folder of a classifier. Use the result as a context manager, or close() it.

    The arguments are those of load(). Raises BundleError, also for the bundle of a language model, DeviceError or
    OptionError.
    """
    return _open(partial(open_session, path, _TASKS, device=device, threads=threads, verify=verify))


def _open(opening: partial[_Parts]) -> Classifier:
    bundle, session, tokenizer = opening()
    # The bundle's path is absolute, whatever the current folder will be.
    again = partial(opening.func, bundle.path, *opening.args[1:], **opening.keywords)
    return Classifier(bundle, session, tokenizer, opening=again)


class Classifier:
    """A loaded classifier. Calls are independent of each other and may come from several threads."""

    def __init__(
        self, bundle: Bundle, session: Session, tokenizer: Tokenizer, *, opening: partial[_Parts] | None = None
    ) -> None:
        """Serve an open bundle, which `opening` opens again after unpickling."""
        assert bundle.labels is not None, "the bundle of a classifier has labels"
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.labels: tuple[str, ...] = bundle.labels.labels
        """The name of each label, in the order of the logits."""
        self.finetuning_task: str | None = bundle.labels.finetuning_task
        """What the classifier reads, one of contract.FineTuning; None where the bundle does not say it."""
        self._problem_type = bundle.labels.problem_type
        self._reader = InputReader.of_bundle(bundle, tokenizer)
        self._opening = opening
        self._session: Session | None = session
        self._fork_count = fork_count()

    @property
    def session(self) -> Session:
        """The open graph. Raises ClosedError after close(), and in a forked child."""
        if self._session is None:
            raise ClosedError("this classifier is closed; load the bundle again")
        if self._fork_count != fork_count():
            raise ClosedError("this classifier was loaded in another process; load the bundle in this one")
        return self._session

    @property
    def device(self) -> str:
        """Where the graph runs: "cpu" or "cuda:N"."""
        return str(self.session.device)

    def close(self) -> None:
        """Release the model. Closing twice is fine."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the arguments of load_classifier(); unpickling loads the bundle again.

        Raises ClosedError after close(), and PicklingError for a classifier that load_classifier() did not make.
        """
        if self._session is None:
            raise ClosedError("this classifier is closed; load the bundle again")
        if self._opening is None:
            raise pickle.PicklingError("only a classifier that load_classifier() made can be pickled")
        return _open, (self._opening,)

    def classify(self, texts: Iterable[ClassifierPrompt], *, batch_tokens: int | None = None) -> list[Classification]:
        """Return what the classifier says of each text, pair of texts (a tuple) or sequence of ids, in order.

        Rows of similar lengths are computed together, as long as they have at most `batch_tokens` tokens in all,
        padding included (by default 256). Of a bundle for similarity, the logits are the sum of those of both orders.
        Raises PromptError for what is no text, empty, or not of the form that the classifier was trained on;
        ContextLengthError for one beyond the context; OptionError or NonFiniteLogitsError.
        """
        return self.answer(self._inputs(texts), batch_tokens=batch_tokens)

    def choose(self, context: str, choices: Iterable[str], *, batch_tokens: int | None = None) -> Classification:
        """Return how a bundle for multiple choice ranks the choices after a context; they are the labels.

        The probabilities are the softmax over one score for each choice. Raises PromptError for choices that are not
        two or more different texts, and for a bundle that gives labels; else raises as classify() does.
        """
        self.session  # noqa: B018  # raises ClosedError before any work
        return self.answer([self._reader.read_choices(context, choices, "context")], batch_tokens=batch_tokens)[0]

    def read(self, text: ClassifierPrompt, *, name: str = "text") -> ClassifierInput:
        """Return a text, pair or sequence of ids as the model reads it, for answer(); messages call it `name`.

        Raises PromptError or ContextLengthError as classify() does.
        """
        return self._reader.read(text, name)

    def read_choices(self, context: str, choices: Iterable[str], *, name: str = "context") -> ClassifierInput:
        """Return a context and its choices as the model reads them, for answer(). Raises as choose() does."""
        return self._reader.read_choices(context, choices, name)

    def answer(self, inputs: Sequence[ClassifierInput], *, batch_tokens: int | None = None) -> list[Classification]:
        """Return what the classifier says of each input that read() or read_choices() made, in order.

        Raises OptionError or NonFiniteLogitsError.
        """
        logits = iter(self.logits([row for each in inputs for row in each.rows], batch_tokens=batch_tokens))
        return [self._answer(each, [next(logits) for _ in each.rows]) for each in inputs]

    def token_rows(self, texts: Iterable[ClassifierPrompt]) -> list[list[int]]:
        """Return the ids of each text as the model reads it, of a pair for similarity those of both orders.

        Raises PromptError or ContextLengthError as classify() does.
        """
        return [row for each in self._inputs(texts) for row in each.rows]

    def logits(self, rows: Sequence[Sequence[int]], *, batch_tokens: int | None = None) -> list[Logits]:
        """Return the logits of rows of ids, checked before: (num_labels,) each, or (tokens, num_labels)."""
        found: dict[int, Logits] = {}
        for batch, logits in self._computed(rows, batch_tokens):
            for index, row in zip(batch, logits, strict=True):
                found[index] = (row if row.ndim == 1 else row[: len(rows[index])]).copy()
        return [found[index] for index in range(len(rows))]

    def _inputs(self, texts: Iterable[ClassifierPrompt]) -> list[ClassifierInput]:
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise PromptError(f"texts = {shown(texts)} (accepted: a list of texts; for a single one, [text])")
        self.session  # noqa: B018  # raises ClosedError before any work
        return [self._reader.read(text, f"texts[{index}]") for index, text in enumerate(texts)]

    def _answer(self, asked: ClassifierInput, rows: Sequence[Logits]) -> Classification:
        for row in rows:
            check_finite(row, f"of {asked.name}")
        if self.bundle.manifest.task == Task.TOKEN_CLASSIFICATION:
            return self._of_tokens(asked, rows[0])
        if asked.choices:
            return _single_label(asked.choices, np.concatenate(rows))
        return self._of_text(rows[0] if len(rows) == 1 else np.sum(rows, axis=0, dtype=np.float32))

    def _computed(self, rows: Sequence[Sequence[int]], batch_tokens: int | None) -> Iterator[tuple[list[int], Logits]]:
        """Yield the places of rows that were computed together, and their logits."""
        limit = integer(1).read("batch_tokens", batch_tokens) or _BATCH_TOKENS
        for batch in _batches([self._width(len(ids)) for ids in rows], limit):
            yield batch, self._run([rows[index] for index in batch])

    def _width(self, tokens: int) -> int:
        """Return the positions that a row takes alone.

        The fused attention computes queries in blocks, and a block of one by a routine that rounds differently. With an
        even count there is none, so a row's logits do not depend on the rows beside it.
        """
        return tokens + tokens % 2 if self.session.graph.flavour == Flavour.NATIVE else tokens

    def _run(self, rows: Sequence[Sequence[int]]) -> Logits:
        """Compute one batch, padded on the right: (rows, num_labels), or (rows, positions, num_labels)."""
        shape = len(rows), max(self._width(len(ids)) for ids in rows)
        input_ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for place, ids in enumerate(rows):
            input_ids[place, : len(ids)] = ids
            mask[place, : len(ids)] = 1
        session = self.session
        binding = session.handle.io_binding()
        binding.bind_cpu_input(Tensor.INPUT_IDS, input_ids)
        binding.bind_cpu_input(Tensor.ATTENTION_MASK, mask)
        binding.bind_output(Tensor.LOGITS)
        run_bound(session, binding)
        logits: Logits = binding.get_outputs()[0].numpy()
        return logits

    def _of_text(self, logits: Logits) -> Classification:
        if self._problem_type == ProblemType.REGRESSION:
            return Classification(label=None, labels=[], probabilities={}, logits=logits)
        if self._problem_type == ProblemType.SINGLE_LABEL:
            return _single_label(self.labels, logits)
        values = 1 / (1 + np.exp(-np.clip(logits.astype(np.float64), -700, None)))
        probabilities = dict(zip(self.labels, values.tolist(), strict=True))
        held = [label for label, each in probabilities.items() if each >= _THRESHOLD]
        return Classification(
            label=self.labels[int(logits.argmax())], labels=held, probabilities=probabilities, logits=logits
        )

    def _of_tokens(self, asked: ClassifierInput, logits: Logits) -> Classification:
        (ids,) = asked.rows
        spans = self._spans(asked)
        best = logits.argmax(-1).tolist()
        all_values = np.exp(log_softmax(logits.astype(np.float64))).tolist()
        tokens = [
            TokenLabel(
                token_id=token_id,
                text=self.tokenizer.decode([token_id]),
                start=start,
                end=end,
                label=self.labels[place],
                probabilities=dict(zip(self.labels, values, strict=True)),
            )
            for token_id, (start, end), place, values in zip(ids, spans, best, all_values, strict=True)
        ]
        labels = [token.label for token in tokens]
        return Classification(label=None, labels=labels, probabilities={}, logits=logits, tokens=tokens)

    def _spans(self, asked: ClassifierInput) -> Sequence[tuple[int, int] | tuple[None, None]]:
        """Return where each token lies in the text, if the tokens' bytes are those of the text."""
        (ids,), text = asked.rows, asked.text
        spans: list[tuple[int, int] | tuple[None, None]] = [(None, None)] * len(ids)
        if not text or self.bundle.manifest.tokenizer.kind != TokenizerKind.BYTE_LEVEL_BPE:
            return spans
        letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        sizes = 1 + sum((letters >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
        letter_of_byte = np.repeat(np.arange(len(letters)), sizes)
        ends = np.cumsum([self.tokenizer.size_bytes([ids[place]]) for place in asked.places])
        if ends[-1] != len(letter_of_byte):  # a pair of surrogates became one character
            return spans
        starts = np.concatenate(([0], ends[:-1]))
        known = zip(letter_of_byte[starts].tolist(), (letter_of_byte[ends - 1] + 1).tolist(), strict=True)
        spans[asked.places.start : asked.places.stop] = known
        return spans


def _single_label(labels: Sequence[str], logits: Logits) -> Classification:
    """Return that one of the labels holds, with the softmax of their logits as the probabilities."""
    best = labels[int(logits.argmax())]
    values = np.exp(log_softmax(logits.astype(np.float64))).tolist()
    return Classification(
        label=best, labels=[best], probabilities=dict(zip(labels, values, strict=True)), logits=logits
    )


def _batches(widths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Split rows into batches of similar widths that have at most `limit` positions, padding included."""
    batch: list[int] = []
    for index in sorted(range(len(widths)), key=widths.__getitem__):
        if batch and widths[index] * (len(batch) + 1) > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
