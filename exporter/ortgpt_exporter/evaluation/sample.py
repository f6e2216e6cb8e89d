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


def sample_rows(engine: Engine, start_id: int) -> list[Ids]:
    """Return 16 rows drawn from the model itself: `start_id`, then 128 tokens, or fewer if its context is shorter."""
    length = min(_ROW_TOKENS, engine.config.n_positions - 1)
    options = GenerationOptions(temperature=1.0, top_k=0, max_new_tokens=length, eos_token_id=[])
    resolved = options.resolve(GenerationOptions())
    rows = [
        Row(
            prompt_ids=[start_id],
            max_new_tokens=length,
            eos_token_ids=frozenset(),
            sampler=Sampler(resolved, [start_id], seed),
        )
        for seed in range(_ROWS)
    ]
    for _ in generate(engine, rows):
        pass
    return [[start_id, *row.token_ids] for row in rows]


def split_rows(token_ids: Sequence[int], start_id: int, n_positions: int) -> list[Ids]:
    """Cut a text into rows that begin with `start_id` and fit the context."""
    width = n_positions - 1
    return [[start_id, *token_ids[begin : begin + width]] for begin in range(0, len(token_ids), width)]
