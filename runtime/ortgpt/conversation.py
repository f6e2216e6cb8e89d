"""A text that grows by turns of the caller and the model; its keys and values stay from turn to turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NoReturn, Unpack

from ortgpt.continuation import text_until
from ortgpt.errors import ContextLengthError, ConversationError, OptionError
from ortgpt.model import LoadedModel, Prompt
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.options.keywords import GenerationKeywords
from ortgpt.options.validation import integer
from ortgpt.request import Request, check_stream, prepare
from ortgpt.results import Completion, Piece
from ortgpt.text.tokenizer import Tokenizer


class _Turn:
    """A turn that is prepared: the ids that the caller adds, and the request that they make."""

    def __init__(self, base: int, added_ids: list[int], request: Request) -> None:
        self.base = base  # the version of the text that it follows
        self.added_ids = added_ids
        self.request = request


class Conversation:
    """A text that grows by turns. One call at a time; a branch() is independent of it.

    `token_ids` are those of the whole text. A turn computes only what the cache does not hold yet.
    """

    def __init__(self, model: LoadedModel, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self._model = model
        self._version = 0  # counts changes of the text
        self._turns: list[tuple[int, list[int]]] = []  # the length of the text before each turn, and the caller's ids
        self._open: _Turn | None = None  # the turn that is being written
        self._start_tokens = 0  # 1 if the text was begun from nothing, after a start id
        self._cached_ids: list[int] = []  # the tokens whose keys and values the cache holds
        self._cache = model.engine.new_cache(1, model.engine.config.n_positions)

    @property
    def text(self) -> str:
        """The whole text so far, without the start id that precedes a text begun from nothing."""
        return self._model.tokenizer.decode(self.token_ids[self._start_tokens :])

    def generate(
        self, text: Prompt = "", options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Completion:
        """Add a text (or token ids), then let the model continue; what it adds, up to a stop string, stays.

        Raises as Generator.generate() does; the text is then as before.
        """
        turn = self._prepare(text, GenerationOptions.make(options, keywords))
        self._begin(turn)
        is_done = False
        try:
            for _ in turn.request.run():
                pass
            is_done = True
        finally:
            self._end(turn, keep=is_done)
        return turn.request.sequences[0].completion()

    def stream(
        self, text: Prompt = "", options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Generator[Piece, None, None]:
        """Do as generate(), and yield the text as it comes. If the loop is left, what came so far stays.

        Text and options are checked at the call. The turn begins with the first piece, and is open until the last one,
        or until the loop is left: no other may begin meanwhile.
        """
        made = GenerationOptions.make(options, keywords)
        check_stream(made)
        return self._pieces(text, made, self._prepare(text, made))

    def _pieces(self, text: Prompt, options: GenerationOptions, turn: _Turn) -> Generator[Piece, None, None]:
        if turn.base != self._version:  # the text has changed since the call
            turn = self._prepare(text, options)
        self._begin(turn)
        try:
            yield from turn.request.pieces()
        finally:
            self._end(turn, keep=True)

    def rewind(self, turns: int = 1) -> list[int]:
        """Take back the last turns; return the ids that the caller added in the first of them.

        Raises OptionError if there are not so many.
        """
        self._check_closed()
        if not self._turns:
            raise OptionError("there is no turn to take back")
        turns = integer(1, len(self._turns), accepted=f"1 to {len(self._turns)}, the turns so far").read("turns", turns)
        length, added_ids = self._turns[-turns]
        del self.token_ids[length:]
        del self._turns[-turns:]
        self._version += 1
        if not self.token_ids:
            self._start_tokens = 0
        return added_ids

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: the cache is in ONNX Runtime's memory. Raises TypeError."""
        raise TypeError("a conversation cannot be pickled; keep its token_ids, and begin one with them, or branch() it")

    def branch(self) -> Conversation:
        """Return a copy that continues from here on its own."""
        self._check_closed()
        other = Conversation(self._model, self.token_ids)
        other._turns, other._cached_ids = list(self._turns), list(self._cached_ids)
        other._start_tokens = self._start_tokens
        other._cache.load_rows([self._cache.read_row(0)])
        return other

    def _check_closed(self) -> None:
        if self._open is not None:
            raise ConversationError("a turn is still being streamed: read it to its end, or close() it, first")

    def _prepare(self, text: Prompt, options: GenerationOptions) -> _Turn:
        """Check a turn. Raises OptionError, PromptError or ContextLengthError."""
        for name, only in (("num_beams", 1), ("num_return_sequences", 1), ("context_overflow", "error")):
            if getattr(options, name) not in (None, only):
                template = f"{{{name}}} (accepted in a conversation: {{only}})"
                raise OptionError(template, {name: getattr(options, name)}, only=only)
        added_ids = self._model.prompt_ids(text, "text")
        try:
            request = prepare(self._model, [[*self.token_ids, *added_ids]], options, cache=self._cache)
        except ContextLengthError as error:
            raise ContextLengthError(f"{error}, rewind(), or begin a new conversation") from None
        return _Turn(self._version, added_ids, request)

    def _begin(self, turn: _Turn) -> None:
        """Open a turn: crop the cache to what it shares with the turn's text, without the last token."""
        self._check_closed()
        sequence = turn.request.sequences[0]
        ids, cached = sequence.row.prompt_ids, self._cached_ids
        same = 0
        while (
            not sequence.options.deterministic and same < min(len(cached), len(ids) - 1) and cached[same] == ids[same]
        ):
            same += 1
        self._cache.crop(same)
        self._cached_ids = list(ids[:same])
        self._open = turn

    def _end(self, turn: _Turn, *, keep: bool) -> None:
        """Note what the cache holds now; with `keep`, append the turn's tokens to the text."""
        self._open = None
        row, tokenizer = turn.request.sequences[0].row, self._model.tokenizer
        self._cached_ids = row.ids[: int(self._cache.lengths[0])]
        if not keep or (not row.token_ids and row.finish_reason is None):
            return  # it failed, or was left before its first token
        self._turns.append((len(self.token_ids), turn.added_ids))
        if not self.token_ids and not turn.added_ids:
            self._start_tokens = 1
        new_ids = [token_id for token_id in row.token_ids if token_id not in row.eos_token_ids]
        if isinstance(row.stop_reason, str):
            new_ids = _until(tokenizer, new_ids, row.stop_reason, row.prompt_ids)
        self.token_ids = [*row.prompt_ids, *new_ids]
        self._version += 1


def _until(tokenizer: Tokenizer, token_ids: Sequence[int], stop: str, after: Sequence[int]) -> list[int]:
    """Return the ids before a stop string in `token_ids`, which follow `after`.

    Whole tokens stay; the rest of the text is encoded if the stop string cuts one.
    """
    text, _ = text_until(tokenizer, token_ids, [stop], after=after)
    stream, size = tokenizer.stream(after), 0
    whole_ids, whole_size = 0, 0
    for place, token_id in enumerate(token_ids):
        size += len(stream.push(token_id))
        if size > len(text):
            break
        if stream.is_whole:
            whole_ids, whole_size = place + 1, size
    return [*token_ids[:whole_ids], *tokenizer.encode(text[whole_size:])]
