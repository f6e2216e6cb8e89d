"""A text that grows by turns, what is given and what the model adds; its keys and values stay from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ortgpt.completion import Completion, Piece
from ortgpt.errors import OptionError
from ortgpt.options import GenerationOptions
from ortgpt.tokenizer import TextStream, Tokenizer
from ortgpt.writer import text_until

if TYPE_CHECKING:
    from ortgpt.calls import Call
    from ortgpt.generator import Generator, Prompt


class Conversation:
    """A running text. One call at a time; a branch() is independent of it.

    `token_ids` are those of the whole text. A turn computes only what the cache does not hold yet.
    """

    def __init__(self, generator: Generator, token_ids: Sequence[int]) -> None:
        engine = generator.engine
        self.token_ids = list(token_ids)
        self._generator = generator
        self._turns: list[int] = []  # how long the text was before each turn
        self._held: list[int] = []  # the tokens whose keys and values the cache has
        self._cache = engine.new_cache(1, engine.config.n_positions)

    @property
    def text(self) -> str:
        """The whole text so far."""
        return self._generator.tokenizer.decode(self.token_ids)

    def generate(self, text: Prompt = "", options: GenerationOptions | None = None, **keywords: Any) -> Completion:
        """Add a text (or token ids), then let the model go on; what it adds, up to a stop string, stays.

        Raises as Generator.generate() does; the text is then as before.
        """
        call = self._begin(text, GenerationOptions.make(options, keywords))
        for _ in call.run():
            pass
        self._end(call)
        return call.sequences[0].completion()

    def stream(self, text: Prompt = "", options: GenerationOptions | None = None, **keywords: Any) -> Iterator[Piece]:
        """Do as generate(), and yield the text as it comes. Where the loop is left, what came so far stays."""
        return self._pieces(self._begin(text, GenerationOptions.make(options, keywords)))

    def _pieces(self, call: Call) -> Iterator[Piece]:
        try:
            yield from call.pieces()
        finally:
            self._end(call)

    def rewind(self, turns: int = 1) -> None:
        """Take back the last turns: what was given, and what the model added."""
        if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= len(self._turns):
            raise OptionError(f"turns = {turns!r} (accepted: 1 to {len(self._turns)}, the turns so far)")
        del self.token_ids[self._turns[-turns] :]
        del self._turns[-turns:]

    def branch(self) -> Conversation:
        """Return a copy, which goes on from here by itself."""
        other = Conversation(self._generator, self.token_ids)
        other._turns, other._held = list(self._turns), list(self._held)
        other._cache.fill([self._cache.read(0)])
        return other

    def _begin(self, text: Prompt, options: GenerationOptions) -> Call:
        """Prepare a turn: the cache goes back to what it holds of the text, all but the last token."""
        ids = [*self.token_ids, *self._generator.prompt_ids(text)]
        for name in ("num_beams", "num_return_sequences", "context_overflow"):
            if getattr(options, name) not in (None, 1, "error"):
                raise OptionError(f"{name} = {getattr(options, name)!r} (accepted in a conversation: its default)")
        call = self._generator.prepare([ids], options, cache=self._cache)
        ids = list(call.sequences[0].row.prompt_ids)
        same = 0
        while same < min(len(self._held), len(ids) - 1) and self._held[same] == ids[same]:
            same += 1
        self._cache.rewind(same)
        self._held = ids[:same]
        return call

    def _end(self, call: Call) -> None:
        """Note what the turn added, and what the cache holds now."""
        row, tokenizer = call.sequences[0].row, self._generator.tokenizer
        self._held = row.ids[: int(self._cache.lengths[0])]
        if not row.token_ids:
            return
        self._turns.append(len(self.token_ids))
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
