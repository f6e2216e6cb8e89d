"""Generate tokens into rows: checks that they fit the context, and chooses the decode loop. Knows no text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortgpt.decode.batch import BatchDecoder
from ortgpt.decode.row import Row
from ortgpt.decode.speculative import generate_speculatively
from ortgpt.engine.engine import Engine
from ortgpt.engine.kv_cache import Cache
from ortgpt.engine.prefix_cache import PrefixCache
from ortgpt.errors import ContextLengthError
from ortgpt.results import Timings


def generate(
    engine: Engine,
    rows: Sequence[Row],
    timings: Timings | None = None,
    *,
    prefixes: PrefixCache | None = None,
    cache: Cache | None = None,
) -> Iterator[list[int]]:
    """Generate into `rows`; after each step yield the indices of the rows that gained a token.

    A row ends at one of its `eos_token_ids`, at `max_new_tokens`, or when the caller sets its `finish_reason` between
    steps. A step reads every weight once for the whole batch. `prefixes` has beginnings that need not be computed
    again; `cache`, for one row, holds a beginning of its tokens, and the caller keeps it. A row with a draft runs
    alone. Raises ContextLengthError at the call, before any work, if a row does not fit; NonFiniteLogitsError when the
    model computes NaN or infinity; EngineError when ONNX Runtime fails.
    """
    check_context(rows, engine.config.n_positions)
    timings = Timings() if timings is None else timings
    assert len(rows) == 1 or not any(row.draft for row in rows), "rows with drafts run one by one"
    if rows[0].draft is not None:
        return generate_speculatively(engine, rows[0], rows[0].draft, timings, prefixes, cache)
    return BatchDecoder(engine, rows, timings, prefixes, cache).run()


def check_context(rows: Sequence[Row], n_positions: int) -> None:
    """Raise ContextLengthError, with the numbers, if prompt and new tokens of a row exceed the context."""
    for index, row in enumerate(rows):
        prompt, new = len(row.prompt_ids), row.max_new_tokens
        if prompt + new > n_positions and not row.slides:
            fit = f"at most {n_positions - prompt} new tokens fit" if prompt < n_positions else "shorten the prompt"
            where = f"row {index}: " if len(rows) > 1 else ""
            raise ContextLengthError(
                f"{where}a prompt of {prompt} tokens and {new} new {'one' if new == 1 else 'ones'} exceed the "
                f"context of {n_positions} tokens; {fit}"
            )
