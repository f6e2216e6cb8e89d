"""A text that grows by turns, what is given and what the model adds; its keys and values stay from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ortgpt.completion import Completion, Piece
from ortgpt.errors import ContextLengthError, ConversationError, OptionError
from ortgpt.option_checks import is_int
from ortgpt.options import GenerationOptions
from ortgpt.request import check_stream
from ortgpt.tokenizer import TextStream, Tokenizer
from ortgpt.writer import text_until

if TYPE_CHECKING:
    from ortgpt.generator import Generator, Prompt
    from ortgpt.request import Request


class Conversation:
    """A running text. One call at a time; a branch() is independent of it.

    `token_ids` are those of the whole text. A turn computes only what the cache does not hold yet.
    """

    def __init__(self, generator: Generator, token_ids: Sequence[int]) -> None:
        engine = generator.engine
        self.token_ids = list(token_ids)
        self._generator = generator
        self._turns: list[tuple[int, list[int]]] = []  # how long the text was before each turn, and what was given
        self._open: Request | None = None  # the turn that is being written
        self._given: list[int] = []  # what the last turn was given
        self._begun_empty = 0  # tokens before the text: one start id, where it was begun from nothing
        self._held: list[int] = []  # the tokens whose keys and values the cache has
        self._cache = engine.new_cache(1, engine.config.n_positions)

    @property
    def text(self) -> str:
        """The whole text so far, without the start id that stands before a text begun from nothing."""
        return self._generator.tokenizer.decode(self.token_ids[self._begun_empty :])

    def generate(self, text: Prompt = "", options: GenerationOptions | None = None, **keywords: Any) -> Completion:
        """Add a text (or token ids), then let the model go on; what it adds, up to a stop string, stays.

        Raises as Generator.generate() does; the text is then as before.
        """
        request = self._begin(text, GenerationOptions.make(options, keywords))
        done = False
        try:
            for _ in request.run():
                pass
            done = True
        finally:
            self._end(request, keep=done)
        return request.sequences[0].completion()

    def stream(self, text: Prompt = "", options: GenerationOptions | None = None, **keywords: Any) -> Iterator[Piece]:
        """Do as generate(), and yield the text as it comes. Where the loop is left, what came so far stays.

        The turn begins with the first piece, and is open until the last one, or until the loop is left: no other may
        begin meanwhile.
        """
        made = GenerationOptions.make(options, keywords)
        check_stream(made)
        self._prepare(text, made)  # what is wrong with them is said at the call
        return self._pieces(text, made)

    def _pieces(self, text: Prompt, options: GenerationOptions) -> Iterator[Piece]:
        request = self._begin(text, options)
        try:
            yield from request.pieces()
        finally:
            self._end(request, keep=True)

    def rewind(self, turns: int = 1) -> list[int]:
        """Take back the last turns, what was given and what the model added; return what the first of them was given.

        Raises OptionError where there are not so many.
        """
        self._check_closed()
        if not self._turns:
            raise OptionError("there is no turn to take back")
        if not is_int(turns, 1) or turns > len(self._turns):
            raise OptionError(f"turns = {turns!r} (accepted: 1 to {len(self._turns)}, the turns so far)")
        length, given = self._turns[-turns]
        del self.token_ids[length:]
        del self._turns[-turns:]
        if not self.token_ids:
            self._begun_empty = 0
        return given

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: what it computed lies in ONNX Runtime's memory. Raises TypeError."""
        raise TypeError("a conversation cannot be pickled; keep its token_ids, and begin one with them, or branch() it")

    def branch(self) -> Conversation:
        """Return a copy, which goes on from here by itself."""
        self._check_closed()
        other = Conversation(self._generator, self.token_ids)
        other._turns, other._held, other._begun_empty = list(self._turns), list(self._held), self._begun_empty
        other._cache.fill([self._cache.read(0)])
        return other

    def _check_closed(self) -> None:
        if self._open is not None:
            raise ConversationError("a turn is still being streamed: read it to its end, or close() it, first")

    def _prepare(self, text: Prompt, options: GenerationOptions) -> tuple[list[int], Request]:
        """Return the ids of what a turn is given, and the request that it makes."""
        given = self._generator.prompt_ids(text, "text")
        for name, only in (("num_beams", 1), ("num_return_sequences", 1), ("context_overflow", "error")):
            if getattr(options, name) not in (None, only):
                raise OptionError(f"{name} = {getattr(options, name)!r} (accepted in a conversation: {only})")
        try:
            return given, self._generator.prepare([[*self.token_ids, *given]], options, cache=self._cache)
        except ContextLengthError as error:
            raise ContextLengthError(f"{error}, rewind(), or begin a new conversation") from None

    def _begin(self, text: Prompt, options: GenerationOptions) -> Request:
        """Open a turn: the cache goes back to what it holds of the text, all but the last token."""
        self._check_closed()
        self._given, request = self._prepare(text, options)
        ids = request.sequences[0].row.prompt_ids
        same = 0
        while not options.deterministic and same < min(len(self._held), len(ids) - 1) and self._held[same] == ids[same]:
            same += 1
        self._cache.rewind(same)
        self._held = list(ids[:same])
        self._open = request
        return request

    def _end(self, request: Request, *, keep: bool) -> None:
        """Note what the cache holds now, and, to `keep` it, what the turn added."""
        self._open = None
        row, tokenizer = request.sequences[0].row, self._generator.tokenizer
        self._held = row.ids[: int(self._cache.lengths[0])]
        if not keep or (not row.token_ids and row.finish_reason is None):
            return  # it failed, or was left before its first token
        self._turns.append((len(self.token_ids), self._given))
        if not self.token_ids and not self._given:
            self._begun_empty = 1
        added = [each for each in row.token_ids if each not in row.eos_token_ids]
        if isinstance(row.stop_reason, str):
            added = _cut(tokenizer, added, text_until(tokenizer, added, [row.stop_reason])[0])
        self.token_ids = [*row.prompt_ids, *added]


def _cut(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return ids of `text`, with which `token_ids` begin: whole tokens, and what is left where it cuts one."""
    stream, size = TextStream(tokenizer), 0
    kept, kept_size = 0, 0
    for place, token_id in enumerate(token_ids):
        size += len(stream.push(token_id))
        if size > len(text):
            break
        if stream.is_whole:
            kept, kept_size = place + 1, size
    return [*token_ids[:kept], *tokenizer.encode(text[kept_size:])]
