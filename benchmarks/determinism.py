"""Compute the same texts in several ways, and count what changes: `python benchmarks/determinism.py BUNDLE...`.

Prints a row for each way, and in it for each bundle how many tokens of 1,000 changed, or "=" if every log-probability
is equal to the bit as well. A text counts up to its first difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ortgpt

PROMPTS, NEW_TOKENS = 24, 96
Texts = Sequence[ortgpt.Completion]


def prompts_of(generator: ortgpt.Generator) -> list[list[int]]:
    """Return prompts of different lengths, drawn from the model."""
    lengths = np.random.default_rng(0).integers(4, 60, size=PROMPTS).tolist()
    return [
        generator.generate("", max_new_tokens=length, temperature=1.0, seed=seed, eos_token_id=[]).token_ids
        for seed, length in enumerate(lengths)
    ]


def other_ways(path: str, generator: ortgpt.Generator, prompts: list[list[int]]) -> dict[str, Callable[..., Texts]]:
    """Return the ways to continue all prompts, by name."""

    def solo(**options: Any) -> Texts:
        return [generator.generate(prompt, **options) for prompt in prompts]

    def one_thread(**options: Any) -> Texts:
        with ortgpt.load(path, threads=1) as single:
            return [single.generate(prompt, **options) for prompt in prompts]

    def batched(**options: Any) -> Texts:
        batches = [prompts[begin : begin + 8] for begin in range(0, len(prompts), 8)]
        return [row for batch in batches for row in generator.generate_batch(batch, **options)]

    def reused(**options: Any) -> Texts:
        generator.prefix_cache(size_bytes=2**28)
        for prompt in prompts:
            generator.generate([*prompt[: len(prompt) // 2], 1], max_new_tokens=1)
        try:
            return solo(**options)
        finally:
            generator.prefix_cache(size_bytes=0)

    def turns(**options: Any) -> Texts:
        answers = []
        for prompt in prompts:
            conversation = generator.conversation(prompt[: len(prompt) // 2])
            conversation.generate(max_new_tokens=1)
            conversation.rewind()
            answers.append(conversation.generate(prompt[len(prompt) // 2 :], **options))
        return answers

    return {
        "the same call again": solo,
        "1 thread instead of 2": one_thread,
        "in a batch of 8": batched,
        "in a batch of 8, deterministic": lambda **options: batched(deterministic=True, **options),
        "with prompt look-up": lambda **options: solo(prompt_lookup_num_tokens=8, **options),
        "after a cached prefix": reused,
        "in turns of a conversation": turns,
    }


def compare(plain: Texts, other: Texts) -> tuple[float, bool]:
    """Return how many tokens of 1,000 changed, and whether all log-probabilities are equal to the bit."""
    changed = compared = 0
    equal = True
    for one, two in zip(plain, other, strict=True):
        pairs = zip(one.token_ids, two.token_ids, strict=True)
        first_change = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        compared += len(one.token_ids) if first_change is None else first_change + 1
        changed += first_change is not None
        assert one.logprobs is not None
        assert two.logprobs is not None
        equal &= [token.logprob for token in one.logprobs] == [token.logprob for token in two.logprobs]
    return 1000 * changed / compared, equal


def main(paths: Sequence[str]) -> None:
    columns: list[dict[str, str]] = []
    for path in paths:
        with ortgpt.load(path, threads=2) as generator:
            prompts, column = prompts_of(generator), {}
            for kind, options in (("greedy", {}), ("sampled", {"temperature": 0.8, "top_p": 0.95, "seed": 1})):
                settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "logprobs": 0, **options}
                plain = [generator.generate(prompt, **settings) for prompt in prompts]
                for name, way in other_ways(path, generator, prompts).items():
                    changed, equal = compare(plain, way(**settings))
                    column[f"{name}, {kind}"] = "=" if equal else f"{changed:.1f}"
            columns.append(column)
    print("| tokens changed of 1,000 | " + " | ".join(path.rstrip("/").rpartition("/")[2] for path in paths) + " |")
    print("|---|" + "---|" * len(paths))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
