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

    A model without a start id begins each row with another id, spread evenly over the vocabulary.
    """
    if start_id is not None:
        starts = [start_id] * _ROWS
    else:
        starts = [index * engine.allowed_vocab_size // _ROWS for index in range(_ROWS)]
    length = min(_ROW_TOKENS, engine.config.n_positions - 1)
    options = GenerationOptions(temperature=1.0, top_k=0, max_new_tokens=length, eos_token_id=[])
    resolved = options.resolve(GenerationOptions())
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
    return [[*row.prompt_ids, *row.token_ids] for row in rows]


def split_rows(token_ids: Sequence[int], start_id: int | None, n_positions: int) -> list[Ids]:
    """Cut a text into rows that begin with `start_id`, if there is one, and fit the context."""
    if start_id is None:
        rows = [list(token_ids[begin : begin + n_positions]) for begin in range(0, len(token_ids), n_positions)]
        return [row for row in rows if len(row) > 1]  # one id predicts nothing
    width = n_positions - 1
    return [[start_id, *token_ids[begin : begin + width]] for begin in range(0, len(token_ids), width)]
