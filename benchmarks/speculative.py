"""Measure what speculative decoding gains and what a grammar costs: `python benchmarks/speculative.py BUNDLE...`.

Prints how many times as fast decoding is with it as without it, medians of five rounds. A logits processor makes the
model write texts that do not depend on its weights: its prompt again with one token in 25 changed; a text that never
repeats; and a misleading one, in which each pair of tokens comes again with another token after it, so that drafts are
proposed and rejected.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from timing import measure_in_turn

import ortgpt

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 400, 300, 5
DRAFT_TOKENS = 10
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def main(paths: list[str]) -> None:
    print("| times as fast | look-up, an edit | look-up, no repetition | look-up, misleading | in JSON of a schema |")
    print("|---|---|---|---|---|")
    for path in paths:
        with ortgpt.load(path) as generator:
            random = np.random.default_rng(0)
            vocab_size = generator.engine.allowed_vocab_size
            prompt = random.permutation(vocab_size)[:PROMPT_TOKENS].tolist()
            edited = list(prompt)
            edited[12::25] = random.integers(vocab_size, size=len(edited[12::25])).tolist()
            fresh = random.integers(vocab_size, size=NEW_TOKENS).tolist()
            misleading = random.integers(12, size=NEW_TOKENS).tolist()  # 144 pairs, each followed by any of 12
            ratios = [lookup_speedup(generator, prompt, target) for target in (edited, fresh, misleading)]
            cells = [f"{ratio:.2f}" for ratio in (*ratios, grammar_speedup(generator))]
        print(f"| {path.rstrip('/').rpartition('/')[2]} | {' | '.join(cells)} |")


def lookup_speedup(generator: ortgpt.Generator, prompt: list[int], target: list[int]) -> float:
    """Return how many times as fast `target` is written after `prompt` with prompt look-up as without."""
    expected = target[:NEW_TOKENS]

    def force(token_ids: Any, logits: Any) -> Any:
        logits[target[len(token_ids) - len(prompt)]] = 1e6
        return logits

    def token_s(**options: Any) -> float:
        completion = generator.generate(
            prompt, max_new_tokens=NEW_TOKENS, eos_token_id=[], logits_processor=force, **options
        )
        assert completion.token_ids == expected
        return seconds_per_token(completion)

    return speedup(token_s, partial(token_s, prompt_lookup_num_tokens=DRAFT_TOKENS))


def grammar_speedup(generator: ortgpt.Generator) -> float:
    """Return how many times as fast a token is in JSON of a schema as in free text."""

    def token_s(**options: Any) -> float:
        completion = generator.generate("A", max_new_tokens=100, seed=1, top_k=0, temperature=1.0, **options)
        return seconds_per_token(completion)

    return speedup(partial(token_s, eos_token_id=[]), partial(token_s, grammar=SCHEMA))


def seconds_per_token(completion: ortgpt.Completion) -> float:
    return completion.timings.decode_s / len(completion.token_ids)


def speedup(plain: Callable[[], float], changed: Callable[[], float]) -> float:
    """Return the median over the rounds of the plain time, divided by the changed one of the same round."""
    times = measure_in_turn({"plain": plain, "changed": changed}, rounds=ROUNDS)
    return statistics.median(one / other for one, other in zip(times["plain"], times["changed"], strict=True))


if __name__ == "__main__":
    main(sys.argv[1:])
