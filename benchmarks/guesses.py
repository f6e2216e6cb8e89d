"""What guesses bring and a grammar costs: decoding with and without, in turn, as ratios of times. Medians of five.

`python benchmarks/guesses.py BUNDLE...` makes the model write, by a logits processor, what a test needs whatever its
weights: its prompt again with one token in 25 changed, a text that never repeats, and one whose pairs of tokens come
again but go on otherwise, so that guesses are made and wrong.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import numpy as np

import ortgpt

_PROMPT, _NEW, _ROUNDS = 400, 300, 5


_SCHEMA = {
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
            vocabulary = generator.engine.allowed_vocab_size
            prompt = random.permutation(vocabulary)[:_PROMPT].tolist()
            edited = list(prompt)
            edited[12::25] = random.integers(vocabulary, size=len(edited[12::25])).tolist()
            fresh = random.integers(vocabulary, size=_NEW).tolist()
            misleading = random.integers(12, size=_NEW).tolist()  # 144 pairs, each followed by any of 12
            ratios = [measure(generator, prompt, target) for target in (edited, fresh, misleading)]
            cells = [f"{ratio:.2f}" for ratio in (*ratios, measure_grammar(generator))]
        print(f"| {path.rstrip('/').rpartition('/')[2]} | {' | '.join(cells)} |")


def measure_grammar(generator: ortgpt.Generator) -> float:
    """Return the time of a token without a grammar over that of one within it."""
    options: dict[str, Any] = {"max_new_tokens": 100, "seed": 1, "top_k": 0, "temperature": 1.0}
    ratios = []
    for _ in range(_ROUNDS + 1):
        free = generator.generate("A", eos_token_id=[], **options)
        held = generator.generate("A", grammar=_SCHEMA, **options)
        tokens = len(held.token_ids)
        ratios.append(free.timings.decode_s / len(free.token_ids) / (held.timings.decode_s / tokens))
    return median(ratios[1:])  # the first builds the table of tokens


def measure(generator: ortgpt.Generator, prompt: list[int], target: list[int]) -> float:
    """Return how many times as fast `target` is written behind `prompt` with look-up as without."""

    def write(token_ids: Any, logits: Any) -> Any:
        logits[target[len(token_ids) - len(prompt)]] = 1e6
        return logits

    options: dict[str, Any] = {"max_new_tokens": _NEW, "eos_token_id": [], "logits_processor": write}
    ratios = []
    for _ in range(_ROUNDS):
        plain = generator.generate(prompt, **options)
        guessed = generator.generate(prompt, prompt_lookup_num_tokens=10, **options)
        assert plain.token_ids == guessed.token_ids == target[:_NEW]
        ratios.append(plain.timings.decode_s / guessed.timings.decode_s)
    return median(ratios)


if __name__ == "__main__":
    main(sys.argv[1:])
