"""The face of classifiers: load a bundle, then give texts or their tokens labels. Holds no state of a call."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from ortgpt.bundle.folder import Bundle
from ortgpt.contract import Flavour, ProblemType, Task, Tensor, TokenizerKind
from ortgpt.decode.next_token import check_finite
from ortgpt.engine.forward import Logits, run_bound
from ortgpt.errors import ClosedError, ContextLengthError, PromptError, shown
from ortgpt.forks import fork_count
from ortgpt.model import Prompt, open_session, prompt_ids
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
        self._problem_type = bundle.labels.problem_type
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

    def classify(self, texts: Iterable[Prompt], *, batch_tokens: int | None = None) -> list[Classification]:
        """Return what the classifier says of each text (or sequence of ids), or of its tokens, in order.

        Texts of similar lengths are computed together, as long as they have at most `batch_tokens` tokens in all,
        padding included (by default 256). Raises PromptError for texts that are none, or empty; ContextLengthError for
        one beyond the context; OptionError or NonFiniteLogitsError.
        """
        rows = self._rows(texts)
        found: dict[int, Classification] = {}
        for batch, logits in self._computed([ids for ids, _ in rows], batch_tokens):
            for index, row in zip(batch, logits, strict=True):
                ids, text = rows[index]
                row = (row[: len(ids)] if self._labels_tokens else row).copy()  # without padding
                check_finite(row, f"of texts[{index}]")
                found[index] = self._of_tokens(ids, text, row) if self._labels_tokens else self._of_text(row)
        return [found[index] for index in range(len(rows))]

    def token_rows(self, texts: Iterable[Prompt]) -> list[list[int]]:
        """Return the ids of each text. Raises PromptError or ContextLengthError as classify() does."""
        return [ids for ids, _ in self._rows(texts)]

    def logits(self, rows: Sequence[Sequence[int]], *, batch_tokens: int | None = None) -> list[Logits]:
        """Return the logits of rows of ids, checked before: (num_labels,) each, or (tokens, num_labels)."""
        found: dict[int, Logits] = {}
        for batch, logits in self._computed(rows, batch_tokens):
            for index, row in zip(batch, logits, strict=True):
                found[index] = (row if row.ndim == 1 else row[: len(rows[index])]).copy()
        return [found[index] for index in range(len(rows))]

    @property
    def _labels_tokens(self) -> bool:
        return self.bundle.manifest.task == Task.TOKEN_CLASSIFICATION

    def _rows(self, texts: Iterable[Prompt]) -> list[tuple[list[int], str | None]]:
        """Return the ids of each text, and the text itself unless it was given as ids."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise PromptError(f"texts = {shown(texts)} (accepted: a list of texts; for a single one, [text])")
        self.session  # noqa: B018  # raises ClosedError before any work
        limit, n_positions = self.bundle.config.vocab_size - self.bundle.manifest.masked_tokens, self._n_positions
        rows = []
        for index, text in enumerate(texts):
            name = f"texts[{index}]"
            if isinstance(text, str) and self.tokenizer.kind == TokenizerKind.TOKENIZER_JSON:
                ids = self.tokenizer.encode_surrounded(text)
            else:
                ids = prompt_ids(text, self.tokenizer, limit, name)
            if not ids:
                raise PromptError(f"{name} is empty (accepted: at least one token)")
            if len(ids) > n_positions:
                raise ContextLengthError(
                    f"{name} has {len(ids):,} tokens, more than the model's context of {n_positions:,}; shorten it"
                )
            rows.append((ids, text if isinstance(text, str) else None))
        return rows

    @property
    def _n_positions(self) -> int:
        return self.bundle.config.n_positions

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
        wide = logits.astype(np.float64)
        is_single = self._problem_type == ProblemType.SINGLE_LABEL
        values = np.exp(log_softmax(wide)) if is_single else 1 / (1 + np.exp(-np.clip(wide, -700, None)))
        best = self.labels[int(logits.argmax())]
        probabilities = dict(zip(self.labels, values.tolist(), strict=True))
        held = [best] if is_single else [label for label, each in probabilities.items() if each >= _THRESHOLD]
        return Classification(label=best, labels=held, probabilities=probabilities, logits=logits)

    def _of_tokens(self, ids: list[int], text: str | None, logits: Logits) -> Classification:
        spans = self._spans(ids, text)
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

    def _spans(self, ids: list[int], text: str | None) -> Sequence[tuple[int, int] | tuple[None, None]]:
        """Return where each token lies in the text, if the tokens' bytes are those of the text."""
        unknown: list[tuple[None, None]] = [(None, None)] * len(ids)
        if text is None or self.bundle.manifest.tokenizer.kind != TokenizerKind.BYTE_LEVEL_BPE:
            return unknown
        letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        sizes = 1 + sum((letters >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
        letter_of_byte = np.repeat(np.arange(len(letters)), sizes)
        ends = np.cumsum([self.tokenizer.size_bytes([token_id]) for token_id in ids])
        if ends[-1] != len(letter_of_byte):  # a pair of surrogates became one character
            return unknown
        starts = np.concatenate(([0], ends[:-1]))
        return list(zip(letter_of_byte[starts].tolist(), (letter_of_byte[ends - 1] + 1).tolist(), strict=True))


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
