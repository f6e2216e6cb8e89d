"""What a call does is done once: options are checked once, prompts are encoded and computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ortgpt
import ortgpt.request
from ortgpt.cli.main import main
from ortgpt.decode import beam_search
from ortgpt.decode.scoring import prompt_logprobs
from ortgpt.engine.prefill_graph import MIN_TOKENS
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.request import prepare
from ortgpt.sampling.processors import make_processors
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt_exporter import Quantization, quantize_bundle

PROMPT = [int(token_id) for token_id in np.random.default_rng(5).integers(300, size=40)]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often options were made, and texts encoded."""
    counted = {"options": 0, "encoded": 0}

    def count(kind: type, name: str, what: str) -> None:
        method: Callable[..., Any] = getattr(kind, name)

        def counting(*args: Any, **keywords: Any) -> Any:
            counted[what] += 1
            return method(*args, **keywords)

        monkeypatch.setattr(kind, name, counting)

    count(GenerationOptions, "__post_init__", "options")
    count(ByteLevelBPE, "encode", "encoded")
    return counted


def test_each_call_checks_its_options_and_encodes_its_prompt_once(
    small: ortgpt.Generator, counts: dict[str, int]
) -> None:
    async def asynchronous() -> None:
        await small.agenerate("a", max_new_tokens=2, seed=1)

    async def streaming() -> None:
        async for _ in small.astream("a", max_new_tokens=2, seed=1):
            pass

    calls: list[Callable[[], object]] = [
        lambda: small.generate("a", max_new_tokens=2, seed=1),
        lambda: list(small.stream("a", max_new_tokens=2, seed=1)),
        lambda: small.generate_batch(["a"], max_new_tokens=2, seed=1),
        lambda: asyncio.run(asynchronous()),
        lambda: asyncio.run(streaming()),
        lambda: list(small.conversation().stream("a", max_new_tokens=2, seed=1)),
    ]
    for call in calls:
        counts.update(options=0, encoded=0)
        call()
        # A conversation that begins with no text encodes that, too.
        assert counts["options"] == 1
        assert counts["encoded"] <= (2 if call is calls[-1] else 1)
    counts.update(options=0)
    options = GenerationOptions(max_new_tokens=2)
    small.generate("a", options)
    assert counts["options"] == 1  # the object's own


def test_a_line_of_a_file_of_prompts_is_encoded_once(
    small_bundle: Path, tmp_path: Path, counts: dict[str, int]
) -> None:
    lines = ["a man", {"prompt": "a truth", "max_new_tokens": 3}, "a wife"]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    args = ["generate", str(small_bundle), "--input", str(tmp_path / "in.jsonl"), "--max-new-tokens", "2"]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.stderr
    assert counts["encoded"] == 3
    assert counts["options"] == 3 + 2  # and the bundle's defaults, which are tried when it is loaded
    assert [len(json.loads(line)["token_ids"]) for line in done.stdout.splitlines()] == [2, 3, 2]


@pytest.mark.parametrize("flavour", ["native", "portable"])
@pytest.mark.parametrize("lookup", [None, 4])
def test_echo_computes_the_prompt_once(
    small: ortgpt.Generator,
    small_portable: ortgpt.Generator,
    flavour: str,
    lookup: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = {"native": small, "portable": small_portable}[flavour]
    plain = generator.generate(PROMPT, max_new_tokens=6, logprobs=2)
    fed: list[int] = []
    prefill_forward = generator.engine.prefill_forward

    def noted(cache: Any, prompts: Any, *rest: Any) -> Any:
        fed.append(sum(map(len, prompts)))
        return prefill_forward(cache, prompts, *rest)

    monkeypatch.setattr(generator.engine, "prefill_forward", noted)
    done = generator.generate(PROMPT, max_new_tokens=6, logprobs=2, echo=True, prompt_lookup_num_tokens=lookup)
    assert sum(fed) == len(PROMPT)
    assert done.token_ids == plain.token_ids
    assert done.prompt_logprobs is not None
    assert [each.token_id for each in done.prompt_logprobs] == PROMPT
    fed.clear()
    rows = generator.generate_batch([PROMPT, PROMPT[:9], PROMPT], max_new_tokens=6, logprobs=2, echo=True)
    assert sum(fed) == len(PROMPT) + 9  # the same prompt once
    assert [row.token_ids for row in rows[::2]] == [plain.token_ids] * 2
    assert rows[0].prompt_logprobs == rows[2].prompt_logprobs == done.prompt_logprobs


def test_rows_that_run_alone_share_the_log_probabilities_of_their_prompt(
    small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counting(engine: Any, ids: Any, count: int) -> Any:
        computed.append(len(ids))
        return prompt_logprobs(engine, ids, count)

    monkeypatch.setattr(ortgpt.request, "prompt_logprobs", counting)
    options = {"logprobs": 1, "echo": True, "max_new_tokens": 2, "deterministic": True, "seed": 1}
    rows = small.generate_batch([PROMPT], num_return_sequences=3, **options)  # type: ignore[arg-type]
    assert computed == [len(PROMPT)]
    assert rows[0].prompt_logprobs == rows[1].prompt_logprobs == rows[2].prompt_logprobs


def test_echo_changes_no_text_of_a_model_with_a_prompt_graph(small_bundle: Path, tmp_path: Path) -> None:
    """The prompt graph rounds otherwise than the decoder, so keys and values of the decoder would change the text."""
    how = Quantization(dtype="int4", max_perplexity_ratio=2.0)
    with ortgpt.load(quantize_bundle(small_bundle, tmp_path / "bundle", how).path) as generator:
        prompts = [list(PROMPT[:1]) * MIN_TOKENS + list(PROMPT[:count]) for count in (3, 9)]
        plain = generator.generate_batch(prompts, max_new_tokens=12, logprobs=0)
        echoed = generator.generate_batch(prompts, max_new_tokens=12, logprobs=0, echo=True)
        assert [row.logprobs for row in echoed] == [row.logprobs for row in plain]


def test_echo_in_a_conversation(small: ortgpt.Generator) -> None:
    talk, plain = small.conversation(PROMPT[:20]), small.conversation(PROMPT[:20])
    talk.generate(max_new_tokens=3)
    plain.generate(max_new_tokens=3)
    found = talk.generate(PROMPT[20:], max_new_tokens=5, logprobs=1, echo=True)
    assert found.token_ids == plain.generate(PROMPT[20:], max_new_tokens=5).token_ids
    assert found.prompt_logprobs is not None
    assert [each.token_id for each in found.prompt_logprobs] == talk.token_ids[: len(found.prompt_logprobs)]
    assert talk.generate(max_new_tokens=4).token_ids == plain.generate(max_new_tokens=4).token_ids


def test_beams_make_their_processors_once(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counting(*args: Any) -> Any:
        made.append(1)
        return make_processors(*args)

    options = {"num_beams": 3, "max_new_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    want = small.generate_batch([PROMPT], num_return_sequences=3, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(beam_search, "make_processors", counting)
    found = small.generate_batch([PROMPT], num_return_sequences=3, **options)  # type: ignore[arg-type]
    assert len(made) == 3
    assert [row.token_ids for row in found] == [row.token_ids for row in want]


def test_a_stream_of_a_text_that_changed_since_the_call_follows_the_new_text(small: ortgpt.Generator) -> None:
    talk, plain = small.conversation(PROMPT[:9]), small.conversation(PROMPT[:9])
    pieces = talk.stream(PROMPT[9:12], max_new_tokens=4)
    talk.generate(PROMPT[20:25], max_new_tokens=3)
    streamed = [token_id for piece in pieces for token_id in piece.token_ids]
    plain.generate(PROMPT[20:25], max_new_tokens=3)
    assert streamed == plain.generate(PROMPT[9:12], max_new_tokens=4).token_ids
    assert talk.token_ids == plain.token_ids


def test_echo_changes_no_deterministic_row_and_keeps_no_copy_of_a_prompts_cache() -> None:
    with ortgpt.load("austen") as generator:  # in 4 bits, where kernels round one row otherwise than several
        prompt = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
        plain = generator.generate(prompt, max_new_tokens=12, logprobs=0, deterministic=True)
        echoed = generator.generate(prompt, max_new_tokens=12, logprobs=0, deterministic=True, echo=True)
        assert echoed.logprobs == plain.logprobs
        request = prepare(generator, [prompt, "A wife"], GenerationOptions(logprobs=0, echo=True, max_new_tokens=2))
        for _ in request.run():
            pass
        assert [each.row.prompt_kv for each in request.sequences] == [None, None]
