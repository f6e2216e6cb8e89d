"""What guesses bring: decoding with prompt look-up and without it, in turn, as a ratio of times.

`python benchmarks/guesses.py BUNDLE...` makes the model write, by a logits processor, what a test needs whatever its
weights: its prompt again with one token in 25 changed, and a text that never repeats. Medians of nine.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import numpy as np

import ortgpt

_PROMPT, _NEW, _ROUNDS = 400, 300, 9


def main(paths: list[str]) -> None:
    print("| speed-up by look-up | an edit of its prompt | a text without repetition |\n|---|---|---|")
    for path in paths:
        with ortgpt.load(path) as generator:
            random = np.random.default_rng(0)
            vocabulary = generator.engine.allowed_vocab_size
            prompt = random.permutation(vocabulary)[:_PROMPT].tolist()
            edited = list(prompt)
            edited[12::25] = random.integers(vocabulary, size=len(edited[12::25])).tolist()
            fresh = random.integers(vocabulary, size=_NEW).tolist()
            cells = [f"{measure(generator, prompt, target):.2f}" for target in (edited, fresh)]
        print(f"| {path.rstrip('/').rpartition('/')[2]} | {' | '.join(cells)} |")


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
