"""Token ids to measure on: drawn from the model itself, or cut from a text."""

from __future__ import annotations

from collections.abc import Sequence

from ortgpt.decode.generate import generate
from ortgpt.decode.row import Row
from ortgpt.engine.engine import Engine
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.sampling.sampler import Sampler

SAMPLED_TOKENS = 2048
_ROWS, _ROW_TOKENS = 16, 128

Ids = list[int]


def sample_rows(engine: Engine, start_id: int) -> list[Ids]:
    """Return texts drawn from the model itself, SAMPLED_TOKENS in all or what its context allows, as token ids."""
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
    """Cut a text into rows that fit the context, each behind `start_id`."""
    room = n_positions - 1
    return [[start_id, *token_ids[begin : begin + room]] for begin in range(0, len(token_ids), room)]
