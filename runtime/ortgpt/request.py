"""One call: prompts become sequences, sequences become batches that fit the memory, tokens become text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ortgpt.continuation import Continuation, text_until
from ortgpt.decode.beam_search import Beam, search_beams
from ortgpt.decode.context_window import ContextWindow, fit_prompt
from ortgpt.decode.drafts import AssistantDraft, PromptLookup
from ortgpt.decode.generate import check_context, generate
from ortgpt.decode.row import Row
from ortgpt.decode.scoring import prompt_logprobs
from ortgpt.engine.engine import Engine
from ortgpt.engine.kv_cache import Cache, RowKV
from ortgpt.errors import ContextLengthError, OptionError, PromptError
from ortgpt.model import LoadedModel, Prompt
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.options.resolved import ResolvedOptions, sequence_seed
from ortgpt.results import Piece, Timings, TokenLogprob
from ortgpt.sampling.sampler import Sampler

_CACHE_BYTES = 2**30  # of keys and values that the rows computed together take, unless the call says otherwise


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt whose options were resolved and that fits the context; its continuations are not begun."""

    ids: Sequence[int]
    """The prompt's ids, cut if it was truncated."""
    options: ResolvedOptions
    seed: int | None
    max_new_tokens: int
    window: ContextWindow
    tokenize_s: float
    """The seconds that encoding and checking took."""


def prepare_prompt(
    model: LoadedModel, prompt: Prompt, options: ResolvedOptions, seed: int | None, name: str = "prompt"
) -> PreparedPrompt:
    """Encode and check one prompt. Raises PromptError, OptionError or ContextLengthError."""
    started = time.perf_counter()
    whole = model.prompt_ids(prompt, name) or [model.start_id]
    ids, max_new_tokens, window = fit_prompt(options, whole, model.engine.config.n_positions)
    return PreparedPrompt(ids, options, seed, max_new_tokens, window, time.perf_counter() - started)


def prepare(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    options: GenerationOptions | Sequence[GenerationOptions],
    *,
    batch_tokens: int | None = None,
    cache: Cache | None = None,
) -> Request:
    """Check prompts and options, and return the request that they make.

    `options` are those of all prompts, or a list with one for each. `cache`, for one prompt, holds a beginning of its
    tokens, and the caller keeps it. Raises PromptError, OptionError or ContextLengthError.
    """
    if not prompts:
        raise PromptError("no prompts (accepted: a list of at least one)")
    if isinstance(options, GenerationOptions):
        resolved = [model.resolve(options)]
        seeds = resolved[0].seeds_for(len(prompts))
        resolved *= len(prompts)
    else:
        resolved = [model.resolve(each) for each in options]
        seeds = [seed for each in resolved for seed in each.seeds_for(1)]
    prepared = []
    for place, (prompt, each, seed) in enumerate(zip(prompts, resolved, seeds, strict=True)):
        name = f"prompts[{place}]" if len(prompts) > 1 else "prompt"
        prepared.append(prepare_prompt(model, prompt, each, seed, name))
    return Request(model, prepared, batch_tokens=batch_tokens, cache=cache)


class Request:
    """The sequences of all prompts, in order: num_return_sequences for each."""

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[PreparedPrompt],
        *,
        batch_tokens: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Begin the sequences. Raises OptionError or ContextLengthError."""
        self._model = model
        self._engine = model.engine
        self._cache = cache
        self._tokenize_s = sum(prompt.tokenize_s for prompt in prompts)
        self._called = time.perf_counter() - self._tokenize_s  # the time limits of rows run from here
        self._assistants: dict[int, Engine] = {}  # those whose tokenizer was compared
        self._echoed: dict[tuple[int, ...], list[TokenLogprob]] = {}  # by count and prompt
        self._batch_tokens = batch_tokens or max(1, _CACHE_BYTES // self._engine.token_bytes)
        self._groups = [self._begin(prompt) for prompt in prompts]  # the sequences of each prompt
        self.sequences = [sequence for group in self._groups for sequence in group]
        self._check_context()

    def _check_context(self) -> None:
        """Raise ContextLengthError, which names the prompt and says what would help, if one does not fit."""
        n_positions = self._engine.config.n_positions
        for place, group in enumerate(self._groups):
            row, options = group[0].row, group[0].options  # as those of the prompt's other sequences
            where = f"prompts[{place}]: " if len(self._groups) > 1 else ""
            try:
                check_context([row], n_positions)
            except ContextLengthError as error:
                helps = "" if self._cache is not None else _overflow_helps(options, row.max_new_tokens, n_positions)
                raise ContextLengthError(f"{where}{error}{helps}") from None
            tokens = len(row.prompt_ids)
            if options.echo and tokens > n_positions:
                raise ContextLengthError(
                    f"{where}echo = True needs a prompt that fits the context: {tokens} tokens, at most {n_positions}"
                )

    def _begin(self, prompt: PreparedPrompt) -> list[Continuation]:
        """Make the sequences of a prompt."""
        options, model = prompt.options, self._model
        sequences = []
        for index in range(options.num_return_sequences):
            grammar = None
            if options.grammar is not None:
                grammar = model.grammars.matcher(options.grammar, options.eos_token_ids)
            row = Row(
                prompt_ids=prompt.ids,
                max_new_tokens=prompt.max_new_tokens,
                eos_token_ids=options.eos_token_ids,
                sampler=Sampler(options, prompt.ids, sequence_seed(prompt.seed, index), grammar),
                window=prompt.window,
                grammar=grammar,
                logprobs=options.logprobs,
                deadline=None if options.timeout_s is None else self._called + options.timeout_s,
                cancel=options.cancel,
            )
            if options.prompt_lookup_num_tokens:
                row.draft = PromptLookup(options.prompt_lookup_num_tokens)
            elif options.assistant_model is not None:
                tokens = len(prompt.ids) + prompt.max_new_tokens
                engine = self._assistant_engine(options.assistant_model)
                row.draft = AssistantDraft(engine, options, row.sampler, prompt.ids, tokens)
            sequences.append(Continuation(row, options, model.tokenizer))
        return sequences

    def _assistant_engine(self, assistant: Any) -> Engine:
        """Return the engine of a draft model. Raises OptionError if it has another tokenizer."""
        if id(assistant) not in self._assistants:
            if not assistant.tokenizer.is_same(self._model.tokenizer):
                raise OptionError(
                    "{assistant_model.name} {path} has another tokenizer than {own}; the two need the same",
                    {"assistant_model": assistant}, path=assistant.bundle.path, own=self._model.bundle.path,
                )  # fmt: skip
            self._assistants[id(assistant)] = assistant.engine
        return self._assistants[id(assistant)]

    def run(self) -> Iterator[list[int]]:
        """Generate; after each step yield the indices of the sequences that gained a token, if any did."""
        start = 0
        batched: list[int] = []
        for group in self._groups:
            indices = list(range(start, start + len(group)))
            start += len(indices)
            options = group[0].options
            if options.num_beams > 1:
                if self._end_late(indices):
                    yield indices
                else:
                    yield from self._search(group, indices)
            elif self._runs_alone(options):
                for index in indices:
                    yield from self._generate([index])
            else:
                batched += indices
        for batch in self._batches(batched):
            yield from self._generate(batch)

    def pieces(self) -> Generator[Piece]:
        """Generate, and yield the text of the only sequence as it comes; its time runs from the first piece on."""
        steps = self.steps()
        with contextlib.closing(steps):
            yield from filter(None, steps)

    def steps(self) -> Generator[Piece | None]:
        """Do as pieces(), and yield None after each step that brought no text."""
        (sequence,) = self.sequences
        if sequence.options.timeout_s is not None:
            sequence.row.deadline = time.perf_counter() + sequence.options.timeout_s
        for _ in self.run():
            yield sequence.piece()

    def _runs_alone(self, options: ResolvedOptions) -> bool:
        has_draft = options.prompt_lookup_num_tokens or options.assistant_model is not None
        # Only a row of a fixed cache in the CPU's memory can be computed again beside others.
        slides = options.context_overflow == "slide" and not self._engine.rows_are_views
        return bool(has_draft or options.deterministic or slides)

    def _batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Split sequences into batches of similar lengths whose caches fit the budget."""
        n_positions = self._engine.config.n_positions
        batch: list[int] = []
        longest = 0
        for index in sorted(indices, key=lambda each: len(self.sequences[each].row.prompt_ids)):
            positions = self.sequences[index].row.max_positions(n_positions)
            longest = max(longest, positions)
            if batch and longest * (len(batch) + 1) > self._batch_tokens:
                yield batch
                batch, longest = [], positions
            batch.append(index)
        if batch:
            yield batch

    def _generate(self, batch: Sequence[int]) -> Iterator[list[int]]:
        late = self._end_late(batch)
        if late:
            yield late
        batch = [index for index in batch if index not in late]
        if not batch:
            return
        sequences = [self.sequences[index] for index in batch]
        timings = Timings(tokenize_s=self._tokenize_s)
        for sequence in sequences:
            sequence.timings = timings
        self._echo(sequences)
        is_deterministic = any(sequence.options.deterministic for sequence in sequences)
        prefixes = None if is_deterministic else self._model.prefixes
        rows = [sequence.row for sequence in sequences]
        for active in generate(self._engine, rows, timings, prefixes=prefixes, cache=self._cache):
            for slot in active:
                sequences[slot].update()
            yield [batch[slot] for slot in active]

    def _echo(self, sequences: Sequence[Continuation]) -> None:
        """Compute the log-probabilities of prompts, and keep the keys and values for generating.

        Keys and values are computed again, as without echo, for a deterministic row; for a model with a prompt graph,
        which rounds differently; and for several rows on a GPU, which takes several tokens on a cache that is not empty
        for one row only.
        """
        engine = self._engine
        can_keep = engine.prefill_graph is None and (engine.session.device.is_cpu or len(sequences) == 1)
        kept: dict[tuple[int, ...], RowKV] = {}
        for sequence in sequences:
            row, count = sequence.row, sequence.options.logprobs
            if not sequence.options.echo or count is None:
                continue
            key = (count, *row.prompt_ids)
            if key not in self._echoed:
                self._echoed[key], kept[key] = prompt_logprobs(engine, row.prompt_ids, count)
            sequence.prompt_logprobs = self._echoed[key]
            if can_keep and not sequence.options.deterministic:
                row.prompt_kv = kept.get(key)
        if self._cache is not None and any(sequence.row.prompt_kv for sequence in sequences):
            self._cache.crop(0)  # its tokens are computed again

    def _end_late(self, indices: Sequence[int]) -> list[int]:
        """End the sequences whose time is over, or that were cancelled, before they begin; return which these are."""
        rows = {index: self.sequences[index].row for index in indices}
        for row in rows.values():
            row.finish_reason = row.interruption()
        return [index for index, row in rows.items() if row.finish_reason is not None]

    def _search(self, group: Sequence[Continuation], indices: Sequence[int]) -> Iterator[list[int]]:
        options, row, tokenizer = group[0].options, group[0].row, self._model.tokenizer

        def ends(token_ids: Sequence[int]) -> bool:
            if not options.stop:
                return False
            return text_until(tokenizer, token_ids, options.stop, after=row.prompt_ids, ended=False)[1] is not None

        timings = Timings(tokenize_s=self._tokenize_s)
        beams: list[Beam] = []
        reason: str | None = None
        for best in search_beams(self._engine, options, row.prompt_ids, row.max_new_tokens, ends, timings):
            beams, reason = best, row.interruption()
            if reason is not None:
                break
            yield []
        for beam, sequence in zip(beams, group, strict=True):
            sequence.timings, sequence.score = timings, beam.score
            sequence.row.deadline = sequence.row.cancel = None
            for token_id in beam.token_ids:
                sequence.row.extend(token_id)
                sequence.update()
            sequence.row.finish_reason = sequence.row.finish_reason or reason
        yield list(indices)


def _overflow_helps(options: ResolvedOptions, new_tokens: int, n_positions: int) -> str:
    """Return which context_overflow would let a prompt through, as the end of a message; nothing if none would."""
    if options.num_beams > 1:
        return ""
    helps = ['"slide", which drops tokens of the beginning']
    if options.context_overflow != "truncate" and new_tokens < n_positions:
        helps.insert(0, '"truncate", which shortens the prompt')
    return f", or give context_overflow = {', or '.join(helps)}"


def check_stream(options: GenerationOptions) -> None:
    """Raise OptionError for options that a stream cannot have."""
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(options, name) or 1) > 1:
            raise OptionError(f"{{{name}}} (accepted when streaming: 1)", {name: getattr(options, name)})
    if options.echo:
        raise OptionError(
            "{echo} (accepted when streaming: False; generate() reports the prompt's, too)", {"echo": options.echo}
        )
