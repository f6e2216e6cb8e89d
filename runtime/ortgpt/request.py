"""One call of an app: prompts become rows, rows become batches that fit the memory, tokens become text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ortgpt.beams import Beam, search_beams
from ortgpt.cache import Cache
from ortgpt.completion import Completion, Piece
from ortgpt.context import fit_prompt
from ortgpt.engine import Engine
from ortgpt.errors import ContextLengthError, OptionError
from ortgpt.guessers import Assistant, PromptLookup
from ortgpt.logprobs import TokenLogprob
from ortgpt.options import GenerationOptions
from ortgpt.picker import Picker
from ortgpt.resolved import ResolvedOptions, sequence_seed
from ortgpt.rows import Row, Timings
from ortgpt.scoring import prompt_logprobs
from ortgpt.writer import Writer, text_until

if TYPE_CHECKING:
    from ortgpt.generator import Generator

_CACHE_BYTES = 2**30  # of keys and values that the rows computed together take, unless the call says otherwise


@dataclass
class _Sequence:
    """One continuation of one prompt."""

    row: Row
    writer: Writer
    options: ResolvedOptions
    timings: Timings
    prompt_logprobs: list[TokenLogprob] | None = None
    score: float | None = None

    def completion(self) -> Completion:
        row = self.row
        assert row.finish_reason is not None, "a sequence that was run has ended"
        return Completion(
            text=self.writer.take(),
            token_ids=row.token_ids,
            finish_reason=row.finish_reason,
            stop_reason=row.stop_reason,
            prompt_tokens=len(row.prompt_ids),
            timings=self.timings,
            logprobs=None if row.logprobs is None else row.token_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            score=self.score,
        )


@dataclass
class AskedPrompt:
    """A prompt with its options, and its seed."""

    ids: Sequence[int]
    options: ResolvedOptions
    seed: int | None
    sequences: list[_Sequence] = field(default_factory=list)


class Request:
    """The sequences of all prompts, in order: num_return_sequences for each."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[AskedPrompt],
        *,
        batch_tokens: int | None = None,
        cache: Cache | None = None,
        tokenize_s: float = 0.0,
    ) -> None:
        self._generator = generator
        self._engine = generator.engine
        self._cache = cache
        self._tokenize_s = tokenize_s
        self._batch_tokens = batch_tokens or max(1, _CACHE_BYTES // self._engine.token_bytes)
        self._prompts = prompts
        self._assistants: dict[int, Engine] = {}  # of those whose tokenizer has been compared
        for prompt in prompts:
            check_ids(prompt.options, self._engine.allowed_vocab_size)
            self._add_sequences(prompt)
        self.sequences = [each for prompt in prompts for each in prompt.sequences]
        self._check_context()

    def _check_context(self) -> None:
        """Raise ContextLengthError, saying what would help, where a row cannot fit."""
        options = self._prompts[0].options
        try:
            self._engine.check_context([each.row for each in self.sequences])
        except ContextLengthError as error:
            if self._cache is not None:
                raise
            helps = ['"slide", which lets the beginning go']
            most_new = max(each.row.max_new_tokens for each in self.sequences)
            if options.context_overflow != "truncate" and most_new < self._engine.config.n_positions:
                helps.insert(0, '"truncate", which shortens the prompt')
            raise ContextLengthError(f"{error}, or give context_overflow = {', or '.join(helps)}") from None
        for each in self.sequences:
            if each.options.echo and len(each.row.prompt_ids) > self._engine.config.n_positions:
                raise ContextLengthError(
                    f"echo = True wants the prompt to fit the context: {len(each.row.prompt_ids)} tokens, at most "
                    f"{self._engine.config.n_positions}"
                )

    def _add_sequences(self, prompt: AskedPrompt) -> None:
        options, generator = prompt.options, self._generator
        ids, new_tokens, window = fit_prompt(options, prompt.ids, self._engine.config.n_positions)
        started = time.perf_counter()
        for index in range(options.num_return_sequences):
            grammar = None
            if options.grammar is not None:
                grammar = generator.grammars.matcher(options.grammar, options.eos_token_ids)
            pick = Picker(options, ids, sequence_seed(prompt.seed, index), grammar)
            row = Row(
                prompt_ids=ids,
                max_new_tokens=new_tokens,
                eos_token_ids=options.eos_token_ids,
                pick=pick,
                window=window,
                grammar=grammar,
                logprobs=options.logprobs,
                deadline=None if options.timeout_s is None else started + options.timeout_s,
                cancel=options.cancel,
            )
            if options.prompt_lookup_num_tokens:
                row.guess = PromptLookup(options.prompt_lookup_num_tokens)
            elif options.assistant_model is not None:
                engine = self._assistant_engine(options.assistant_model)
                row.guess = Assistant(engine, options, pick, ids, len(ids) + new_tokens)
            writer = Writer(generator.tokenizer, options.stop)
            prompt.sequences.append(_Sequence(row, writer, options, Timings(tokenize_s=self._tokenize_s)))

    def _assistant_engine(self, assistant: Generator) -> Engine:
        if self._assistants.get(id(assistant)) is None:
            if not assistant.tokenizer.is_same(self._generator.tokenizer):
                raise OptionError(
                    f"assistant_model {assistant.bundle.path} has another tokenizer than "
                    f"{self._generator.bundle.path}; the two have to have the same"
                )
            self._assistants[id(assistant)] = assistant.engine
        return self._assistants[id(assistant)]

    def run(self) -> Iterator[list[int]]:
        """Generate; after each step yield the indices of the sequences that gained a token."""
        for prompt in self._prompts:
            row = prompt.sequences[0].row
            if prompt.options.echo and prompt.options.logprobs is not None and row.interruption() is None:
                found = prompt_logprobs(self._engine, row.prompt_ids, prompt.options.logprobs)
                for each in prompt.sequences:
                    each.prompt_logprobs = found
        start = 0
        batched: list[int] = []
        for prompt in self._prompts:
            indices = list(range(start, start + len(prompt.sequences)))
            start += len(indices)
            if prompt.options.num_beams > 1:
                if self._late(indices):
                    yield indices
                else:
                    yield from self._search(prompt, indices)
            elif self._goes_alone(prompt.options):
                for index in indices:
                    yield from self._generate([index])
            else:
                batched += indices
        for batch in self._batches(batched):
            yield from self._generate(batch)

    def pieces(self) -> Iterator[Piece]:
        """Generate, and yield the text of the only sequence as it comes."""
        shown = 0
        writer, row = self.sequences[0].writer, self.sequences[0].row
        for _ in self.run():
            text = writer.take()
            if text or row.finish_reason:
                logprobs = None if row.logprobs is None else row.token_logprobs[shown:]
                new_ids = row.token_ids[shown:]
                yield Piece(
                    text=text,
                    token_ids=new_ids,
                    finish_reason=row.finish_reason,
                    stop_reason=row.stop_reason,
                    logprobs=logprobs,
                )
                shown = len(row.token_ids)

    def _goes_alone(self, options: ResolvedOptions) -> bool:
        guesses = options.prompt_lookup_num_tokens or options.assistant_model is not None
        # Only a row of a fixed cache in the CPU's memory can be computed anew among others.
        slides = options.context_overflow == "slide" and not self._engine.rows_are_views
        return bool(guesses or options.deterministic or slides)

    def _batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Split sequences into batches of like lengths whose caches are no larger than the budget."""
        n_positions = self._engine.config.n_positions
        batch: list[int] = []
        longest = 0
        for index in sorted(indices, key=lambda each: len(self.sequences[each].row.prompt_ids)):
            room = self.sequences[index].row.room(n_positions)
            longest = max(longest, room)
            if batch and longest * (len(batch) + 1) > self._batch_tokens:
                yield batch
                batch, longest = [], room
            batch.append(index)
        if batch:
            yield batch

    def _generate(self, batch: Sequence[int]) -> Iterator[list[int]]:
        late = self._late(batch)
        if late:
            yield late
        batch = [index for index in batch if index not in late]
        if not batch:
            return
        sequences = [self.sequences[index] for index in batch]
        timings = Timings(tokenize_s=self._tokenize_s)
        for each in sequences:
            each.timings = timings
        deterministic = any(each.options.deterministic for each in sequences)
        prefixes = None if deterministic else self._generator.prefixes
        steps = self._engine.generate([each.row for each in sequences], timings, prefixes=prefixes, cache=self._cache)
        for active in steps:
            for slot in active:
                sequences[slot].writer.update(sequences[slot].row)
            yield [batch[slot] for slot in active]

    def _late(self, indices: Sequence[int]) -> list[int]:
        """End the sequences whose time is over or that were cancelled before they begin, and return which they are."""
        rows = {index: self.sequences[index].row for index in indices}
        for row in rows.values():
            row.finish_reason = row.interruption()
        return [index for index, row in rows.items() if row.finish_reason is not None]

    def _search(self, prompt: AskedPrompt, indices: Sequence[int]) -> Iterator[list[int]]:
        options, row, tokenizer = prompt.options, prompt.sequences[0].row, self._generator.tokenizer

        def ends(token_ids: Sequence[int]) -> bool:
            return bool(options.stop) and text_until(tokenizer, token_ids, options.stop)[1] is not None

        timings = Timings(tokenize_s=self._tokenize_s)
        beams: list[Beam] = []
        reason: str | None = None
        for found in search_beams(self._engine, options, row.prompt_ids, row.max_new_tokens, ends, timings):
            beams, reason = found, row.interruption()
            if reason is not None:
                break
        for beam, each in zip(beams, prompt.sequences, strict=True):
            each.timings, each.score = timings, beam.score
            each.row.deadline = each.row.cancel = None
            for token_id in beam.token_ids:
                each.row.extend(token_id)
                each.writer.update(each.row)
            each.row.finish_reason = each.row.finish_reason or reason
        yield list(indices)


def check_stream(options: GenerationOptions) -> None:
    """Raise OptionError for options that a stream cannot have."""
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(options, name) or 1) > 1:
            raise OptionError(f"{name} = {getattr(options, name)} (accepted when streaming: 1)")
    if options.echo:
        raise OptionError("echo = True (accepted when streaming: False; generate() reports the prompt's, too)")


def check_ids(options: ResolvedOptions, limit: int) -> None:
    """Raise OptionError for an option that names an id beyond the vocabulary, or more ids than there are."""
    for name, ids in (
        ("eos_token_id", options.eos_token_ids),
        ("suppress_tokens", options.suppress_tokens),
        ("logit_bias", options.logit_bias),
        ("bad_words", [each for word in options.bad_words_ids for each in word]),
    ):
        bad = sorted(token_id for token_id in ids if token_id >= limit)
        if bad:
            raise OptionError(f"{name} = {bad[0]} is not in the vocabulary (accepted: 0 to {limit - 1})")
    if options.logprobs is not None and options.logprobs > limit:
        raise OptionError(f"logprobs = {options.logprobs} (accepted: at most the vocabulary's {limit})")
