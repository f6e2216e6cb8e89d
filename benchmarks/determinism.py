"""What stays equal when the same text is computed otherwise: tokens, and log-probabilities to the bit.

`python benchmarks/determinism.py BUNDLE...` prints a row for each way to compute, and for each bundle how many tokens
of 1,000 changed; "=" where every log-probability was equal to the bit, too. A text counts up to its first difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ortgpt

_PROMPTS, _TOKENS = 24, 96
Texts = Sequence[ortgpt.Completion]


def prompts_of(generator: ortgpt.Generator) -> list[list[int]]:
    """Return the beginnings of texts that the model draws, of different lengths."""
    lengths = np.random.default_rng(0).integers(4, 60, size=_PROMPTS).tolist()
    return [
        generator.generate("", max_new_tokens=length, temperature=1.0, seed=seed, eos_token_id=[]).token_ids
        for seed, length in enumerate(lengths)
    ]


def ways(path: str, generator: ortgpt.Generator, prompts: list[list[int]]) -> dict[str, Callable[..., Texts]]:
    """Return ways to continue all prompts, by what is otherwise in them."""

    def solo(**options: Any) -> Texts:
        return [generator.generate(prompt, **options) for prompt in prompts]

    def one_thread(**options: Any) -> Texts:
        with ortgpt.load(path, threads=1) as single:
            return [single.generate(prompt, **options) for prompt in prompts]

    def batched(**options: Any) -> Texts:
        parts = [prompts[begin : begin + 8] for begin in range(0, len(prompts), 8)]
        return [row for part in parts for row in generator.generate_batch(part, **options)]

    def reused(**options: Any) -> Texts:
        generator.prefix_cache(size_bytes=2**28)
        for prompt in prompts:
            generator.generate([*prompt[: len(prompt) // 2], 1], max_new_tokens=1)
        try:
            return solo(**options)
        finally:
            generator.prefix_cache(size_bytes=0)

    def turns(**options: Any) -> Texts:
        found = []
        for prompt in prompts:
            talk = generator.conversation(prompt[: len(prompt) // 2])
            talk.generate(max_new_tokens=1)
            talk.rewind()
            found.append(talk.generate(prompt[len(prompt) // 2 :], **options))
        return found

    return {
        "the same call again": solo,
        "1 thread instead of 2": one_thread,
        "in a batch of 8": batched,
        "in a batch of 8, deterministic": lambda **options: batched(deterministic=True, **options),
        "with prompt look-up": lambda **options: solo(prompt_lookup_num_tokens=8, **options),
        "behind a prefix that was cached": reused,
        "in turns of a conversation": turns,
    }


def compare(plain: Texts, other: Texts) -> tuple[float, bool]:
    """Return how many tokens of 1,000 changed, and whether all log-probabilities are equal to the bit."""
    changed = compared = 0
    equal = True
    for one, two in zip(plain, other, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=True)) if a != b), None)
        compared += len(one.token_ids) if same is None else same + 1
        changed += same is not None
        assert one.logprobs is not None
        assert two.logprobs is not None
        equal &= [each.logprob for each in one.logprobs] == [each.logprob for each in two.logprobs]
    return 1000 * changed / compared, equal


def main(paths: Sequence[str]) -> None:
    columns: list[dict[str, str]] = []
    for path in paths:
        with ortgpt.load(path, threads=2) as generator:
            prompts, column = prompts_of(generator), {}
            for kind, options in (("greedy", {}), ("drawn", {"temperature": 0.8, "top_p": 0.95, "seed": 1})):
                settings: dict[str, Any] = {"max_new_tokens": _TOKENS, "eos_token_id": [], "logprobs": 0, **options}
                plain = [generator.generate(prompt, **settings) for prompt in prompts]
                for name, way in ways(path, generator, prompts).items():
                    changed, equal = compare(plain, way(**settings))
                    column[f"{name}, {kind}"] = "=" if equal else f"{changed:.1f}"
            columns.append(column)
    print("| tokens changed of 1,000 | " + " | ".join(path.rstrip("/").rpartition("/")[2] for path in paths) + " |")
    print("|---|" + "---|" * len(paths))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
