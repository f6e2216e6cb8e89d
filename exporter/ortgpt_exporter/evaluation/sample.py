"""Rows of token ids to measure on: drawn from the model itself, or cut from a text. Knows no file and no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from ortgpt.decode.generate import generate
from ortgpt.decode.row import Row
from ortgpt.engine.engine import Engine
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.sampling.sampler import Sampler

_ROWS, _ROW_TOKENS = 16, 128

Ids = list[int]


def sample_rows(engine: Engine, start_id: int | None) -> list[Ids]:
    """Return 16 rows drawn from the model itself: `start_id`, then 128 tokens, or fewer if its context is shorter.

    Without a `start_id`, the rows begin with tokens spread over the vocabulary.
    """
    length = min(_ROW_TOKENS, engine.config.n_positions - 1)
    options = GenerationOptions(temperature=1.0, top_k=0, max_new_tokens=length, eos_token_id=[])
    resolved = options.resolve(GenerationOptions())
    spread = [(2 * seed + 1) * engine.allowed_vocab_size // (2 * _ROWS) for seed in range(_ROWS)]
    starts = spread if start_id is None else [start_id] * _ROWS
    rows = [
        Row(
            prompt_ids=[start],
            max_new_tokens=length,
            eos_token_ids=frozenset(),
            sampler=Sampler(resolved, [start], seed),
        )
        for seed, start in enumerate(starts)
    ]
    for _ in generate(engine, rows):
        pass
    return [[start, *row.token_ids] for start, row in zip(starts, rows, strict=True)]


def split_rows(token_ids: Sequence[int], start_id: int | None, n_positions: int) -> list[Ids]:
    """Cut a text into rows that begin with `start_id` and fit the context.

    Without a `start_id`, each row begins with the last token of the row before it, and the first with the text's own.
    """
    width = n_positions - 1
    if start_id is None:
        return [[*token_ids[begin : begin + width + 1]] for begin in range(0, len(token_ids) - 1, width)]
    return [[start_id, *token_ids[begin : begin + width]] for begin in range(0, len(token_ids), width)]
