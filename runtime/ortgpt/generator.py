"""What apps use: load a bundle, then generate, stream, batch and score text. Holds no state of a call."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle import Bundle, open_bundle
from ortgpt.contract import File, Key, Promise
from ortgpt.engine import Engine, Row, Timings
from ortgpt.errors import BundleError, ClosedError, OptionError, PromptError
from ortgpt.options import GenerationOptions, read_generation_config
from ortgpt.picker import Picker
from ortgpt.prefill import find_prefill
from ortgpt.scoring import Score, score_ids
from ortgpt.selector import open_selector
from ortgpt.session import plan_session
from ortgpt.tokenizer import StopMatcher, TextStream, Tokenizer

_logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation.

    `text` is without prompt, stop string and end-of-text; `token_ids` are all generated ids, including an end-of-text.
    `finish_reason` is "stop" or "length"; `stop_reason` the stop string or the end-of-text id that ended it, else None.
    `timings` are those of the whole call, which a batch shares.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    timings: Timings


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a streamed continuation: whole characters, the ids behind them; the last has a `finish_reason`."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None


def load(
    path: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None, verify: str = "sha256"
) -> Generator:
    """Load a bundle folder; use the result as a context manager, or close() it.

    `device` is "auto", "cpu", "cuda" or "cuda:N"; `threads` the CPU threads of one operator (default: the CPUs this
    process may use). `verify` is "sha256", which reads every file while the model opens, or "size". Raises
    BundleError, DeviceError or OptionError.
    """
    if verify not in ("sha256", "size"):
        raise OptionError(f"verify = {verify!r} (accepted: sha256, size)")
    bundle = open_bundle(path)
    with ThreadPoolExecutor(2) as background:
        hashes = background.submit(bundle.verify_hashes) if verify == "sha256" else None
        try:
            # Reading the tokenizer keeps the interpreter busy: what opening the graph wants of it comes before.
            opening = background.submit(plan_session(bundle, device=device, threads=threads))
            tokenizer = Tokenizer.load(bundle.path)
            session = opening.result()
            selector = open_selector(bundle, session)
        except Exception:
            if hashes is not None:
                hashes.result()  # a damaged file is the better reason
            raise
        if hashes is not None:
            hashes.result()
    if bundle.manifest.precision.promise.get(Key.KIND) == Promise.BATCH_DEPENDENT:
        _logger.warning(
            "%s is batch_dependent: a row's answer changes with the other rows of its batch, and with the length of a "
            "prompt's pieces; `ortgpt quantize` has recipes without that",
            bundle.path,
        )
    masked = bundle.manifest.masked_tokens
    if bundle.config.vocab_size - masked != tokenizer.vocab_size:
        raise BundleError(
            f"{bundle.path}: the tokenizer has {tokenizer.vocab_size} ids, but the model has "
            f"{bundle.config.vocab_size} rows of which {masked} are masked; export it anew"
        )
    prefill = find_prefill(bundle, session)
    engine = Engine(session, bundle.config, masked_tokens=masked, prefill=prefill, selector=selector)
    return Generator(bundle, engine, tokenizer)


class Generator:
    """A loaded bundle. Calls are independent of each other and may come from several threads."""

    def __init__(self, bundle: Bundle, engine: Engine, tokenizer: Tokenizer) -> None:
        self.bundle = bundle
        self.tokenizer = tokenizer
        self._engine: Engine | None = engine
        try:
            self._defaults = read_generation_config(bundle.generation_config, bundle.config.eos_token_ids)
        except OptionError as error:
            raise BundleError(f"{bundle.path / File.GENERATION_CONFIG}: {error}") from None

    @property
    def engine(self) -> Engine:
        """The engine under it, which works on token ids. Raises ClosedError after close()."""
        if self._engine is None:
            raise ClosedError("this generator is closed; load the bundle again")
        return self._engine

    def close(self) -> None:
        """Release the model. Closing twice is fine."""
        self._engine = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Any) -> Completion:
        """Continue one prompt, a text or token ids; options as in GenerationOptions, as an object or by keyword.

        An empty prompt starts from end-of-text. Raises OptionError, UnknownOptionError, PromptError,
        ContextLengthError (before any work) or NonFiniteLogitsError.
        """
        return self.generate_batch([prompt], options, **keywords)[0]

    def generate_batch(
        self, prompts: Iterable[Prompt], options: GenerationOptions | None = None, **keywords: Any
    ) -> list[Completion]:
        """Continue several prompts of any lengths at once; each as generate() would. Raises as generate() does."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts = {_short(prompts)} (accepted: a list of prompts; generate takes a single one)")
        call = _Call(self, list(prompts), GenerationOptions.make(options, keywords))
        for _ in call.run():
            pass
        return call.completions()

    def stream(self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Any) -> Iterator[Piece]:
        """Continue one prompt and yield the text as it comes; the pieces joined are the text of generate().

        The last piece has a finish_reason. Options and prompt are checked at the call, not at the first piece; raises
        as generate() does.
        """
        return self._pieces(_Call(self, [prompt], GenerationOptions.make(options, keywords)))

    @staticmethod
    def _pieces(call: _Call) -> Iterator[Piece]:
        shown = 0
        writer, row = call.writers[0], call.rows[0]
        for _ in call.run():
            text = writer.take()
            if text or row.finish_reason:
                yield Piece(text=text, token_ids=row.token_ids[shown:], finish_reason=row.finish_reason)
                shown = len(row.token_ids)

    def score(self, text: Prompt) -> Score:
        """Measure how well the model predicts a text (or ids): nll, perplexity, bits per byte.

        The first token is predicted from end-of-text. Text beyond the context is scored in windows of n_positions
        with stride n_positions / 2, each token once. Raises PromptError for an empty text.
        """
        if isinstance(text, str):
            text_bytes = text.encode("utf-8", errors="surrogatepass")
            return score_ids(self.engine, self.start_id, self.tokenizer.encode(text), len(text_bytes))
        ids = self._prompt_ids(text)
        size_bytes = sum(len(self.tokenizer.token_bytes(token_id)) for token_id in ids)
        return score_ids(self.engine, self.start_id, ids, size_bytes)

    @property
    def start_id(self) -> int:
        """The id that stands before all text: end-of-text, which GPT-2 uses as its beginning too.

        Raises PromptError for a model that has none.
        """
        bos = self.bundle.config.bos_token_id
        if bos is not None:
            return bos
        if self.bundle.config.eos_token_ids:
            return self.bundle.config.eos_token_ids[0]
        raise PromptError("the model has no end-of-text token to start from; give a prompt of at least one token")

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            array = np.asarray(prompt)
        except (TypeError, ValueError):
            array = np.asarray(None)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PromptError(f"prompt = {_short(prompt)} (accepted: a text, or a sequence of token ids)")
        ids = [int(token_id) for token_id in array]
        limit = self.engine.allowed_vocab_size
        bad = [token_id for token_id in ids if not 0 <= token_id < limit]
        if bad:
            raise PromptError(f"token id {bad[0]} is not in the vocabulary (accepted: 0 to {limit - 1})")
        return ids


class _Call:
    """One generation in flight: the rows that the engine fills, and a writer a row that makes text of them."""

    def __init__(self, generator: Generator, prompts: Sequence[Prompt], options: GenerationOptions) -> None:
        started = time.perf_counter()
        engine = generator.engine
        resolved = options.resolve(generator._defaults)
        self._check_ids(resolved.eos_token_ids, engine.allowed_vocab_size)
        if not prompts:
            raise PromptError("no prompts (accepted: a list of at least one)")
        n_positions = engine.config.n_positions
        seeds = resolved.seeds_for(len(prompts))
        self.rows: list[Row] = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            prompt_ids = generator._prompt_ids(prompt) or [generator.start_id]
            row = Row(
                prompt_ids=prompt_ids,
                max_new_tokens=resolved.new_tokens_for(len(prompt_ids), n_positions),
                eos_token_ids=resolved.eos_token_ids,
                pick=Picker(resolved, prompt_ids, seed),
            )
            self.rows.append(row)
        self.writers = [_Writer(generator.tokenizer, resolved.stop) for _ in self.rows]
        self.timings = Timings(tokenize_s=time.perf_counter() - started)
        self._steps = engine.generate(self.rows, self.timings)

    @staticmethod
    def _check_ids(token_ids: frozenset[int], limit: int) -> None:
        bad = sorted(token_id for token_id in token_ids if token_id >= limit)
        if bad:
            raise OptionError(f"eos_token_id = {bad[0]} is not in the vocabulary (accepted: 0 to {limit - 1})")

    def run(self) -> Iterator[list[int]]:
        """Drive the engine; after each step yield the indices of the rows that gained a token."""
        for active in self._steps:
            for index in active:
                self.writers[index].update(self.rows[index])
            yield active

    def completions(self) -> list[Completion]:
        return [
            Completion(
                text=writer.take(),
                token_ids=row.token_ids,
                finish_reason=row.finish_reason or "length",
                stop_reason=row.stop_reason,
                prompt_tokens=len(row.prompt_ids),
                timings=self.timings,
            )
            for row, writer in zip(self.rows, self.writers, strict=True)
        ]


class _Writer:
    """Turn one row's tokens into text up to a stop string; end the row where one is found."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._matcher = StopMatcher(stops)
        self._ready: list[str] = []

    def update(self, row: Row) -> None:
        """Take the row's newest token."""
        ended_by_eos = row.finish_reason == "stop"
        if not ended_by_eos:
            self._feed(self._stream.push(row.token_ids[-1]), row)
        if row.finish_reason is not None and not isinstance(row.stop_reason, str):
            self._feed(self._stream.finish(), row)
        if row.finish_reason is not None and not isinstance(row.stop_reason, str):
            self._ready.append(self._matcher.finish())

    def _feed(self, text: str, row: Row) -> None:
        shown, stop = self._matcher.push(text)
        self._ready.append(shown)
        if stop is not None:
            row.finish_reason, row.stop_reason = "stop", stop

    def take(self) -> str:
        """Return the text that is ready, once."""
        text = "".join(self._ready)
        self._ready.clear()
        return text


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
