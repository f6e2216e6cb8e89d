"""Scores against `transformers`' loss, and windows against a direct computation in PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import PromptError
from ortgpt_models import load_gpt

TEXT = "that a single man in possession of a good fortune — 日本"


def test_score_equals_the_loss_of_transformers(small: ortgpt.Generator, small_model: Any) -> None:
    ids = small.tokenizer.encode(TEXT)
    assert len(ids) < 64
    inputs = torch.tensor([[0, *ids]])
    with torch.no_grad():
        loss = small_model(inputs, labels=inputs).loss.item()
        logprobs = torch.log_softmax(small_model(inputs).logits[0, :-1].double(), -1)
    score = small.score(TEXT)
    assert score.tokens == len(ids)
    assert score.nll / score.tokens == pytest.approx(loss, abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(loss * len(ids) / math.log(2) / len(TEXT.encode()), rel=1e-4)
    assert score.token_logprobs == pytest.approx(logprobs[range(len(ids)), ids].tolist(), abs=1e-4)
    assert small.score(ids).nll == score.nll
    assert small.score(ids).bits_per_byte == score.bits_per_byte


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 97, 200])
def test_long_texts_slide_by_half_the_context(small: ortgpt.Generator, small_checkpoint: Path, length: int) -> None:
    gpt = load_gpt(small_checkpoint)
    ids = np.random.default_rng(length).integers(300, size=length).tolist()
    whole = [0, *ids]
    want = []
    for index in range(length):  # token `index` of the text follows whole[: index + 1]
        # Windows begin at 0, 32, 64 ...; the first one whose 64 inputs reach position `index` counts it.
        begin = 0 if index < 64 else -(-(index - 63) // 32) * 32
        with torch.no_grad():
            logits = gpt(torch.tensor([whole[begin : index + 1]]))[0, -1]
        want.append(torch.log_softmax(logits.double(), -1)[ids[index]].item())
    score = small.score(ids)
    assert score.token_logprobs == pytest.approx(want, abs=1e-4)
    assert score.nll == pytest.approx(-sum(want), abs=1e-3)


def test_nothing_to_score_is_refused(small: ortgpt.Generator) -> None:
    with pytest.raises(PromptError, match="nothing to score"):
        small.score("")
    with pytest.raises(PromptError, match="nothing to score"):
        small.score([])


def test_masked_tokens_have_no_probability(small: ortgpt.Generator) -> None:
    from ortgpt.decode.scoring import score_ids
    from ortgpt.engine.engine import Engine

    masked = Engine(small.engine.session, small.engine.config, masked_tokens=100)
    ids = [5, 190, 7]
    with torch.no_grad():
        logits = small.engine.prefill(small.engine.new_cache(1, 3), [[0, 5, 190]], np.arange(3)[None])[0][:, :200]
    want = torch.log_softmax(torch.from_numpy(logits).double(), -1)[range(3), ids]
    assert score_ids(masked, 0, ids, 3).token_logprobs == pytest.approx(want.tolist(), abs=1e-6)


@pytest.mark.parametrize("text", ["a\ud83d\ude00b", "a\ud83db", "\udc00", "\udc00\ud800 a", "a 😀 日本"])
def test_the_bytes_of_a_score_are_those_that_were_encoded(small: ortgpt.Generator, text: str) -> None:
    """A surrogate pair is the character that it stands for, half of one U+FFFD: as UTF-16 decoders have it."""
    meant = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    score = small.score(text)
    assert score.token_ids == small.score(meant).token_ids
    assert score.text_bytes == len(meant.encode()) == small.score(score.token_ids).text_bytes
