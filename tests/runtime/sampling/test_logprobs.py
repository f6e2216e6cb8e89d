"""Log-probabilities against PyTorch, of prompt and continuation; choices against scores of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ortgpt
from ortgpt import ContextLengthError, OptionError, PromptError


@pytest.mark.parametrize(
    "options", [{}, {"seed": 3, "temperature": 2.0, "repetition_penalty": 1.4, "suppress_tokens": 7}]
)
def test_logprobs_are_the_models_own(small: ortgpt.Generator, small_model: Any, options: dict[str, Any]) -> None:
    ids = small.tokenizer.encode("It is a truth universally")
    done = small.generate(ids, max_new_tokens=10, logprobs=4, echo=True, eos_token_id=[], **options)
    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    with torch.no_grad():
        want = torch.log_softmax(small_model(torch.tensor([[*ids, *done.token_ids]])).logits[0].double(), -1).numpy()
    found = [*done.prompt_logprobs, *done.logprobs]
    assert [each.token_id for each in found] == [*ids, *done.token_ids]
    assert (found[0].logprob, found[0].top) == (None, [])
    for place, each in enumerate(found[1:]):
        assert each.logprob == pytest.approx(want[place, each.token_id], abs=1e-4)
        assert [token_id for token_id, _ in each.top] == np.argsort(-want[place])[:4].tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(np.sort(want[place])[::-1][:4].tolist(), abs=1e-4)
    plain = small.generate(ids, max_new_tokens=10, eos_token_id=[], **options)
    assert (plain.token_ids, plain.logprobs, plain.prompt_logprobs) == (done.token_ids, None, None)


def test_logprobs_come_with_the_pieces_of_a_stream(small: ortgpt.Generator) -> None:
    done = small.generate("a man", max_new_tokens=12, logprobs=2)
    pieces = list(small.stream("a man", max_new_tokens=12, logprobs=2))
    assert [each for piece in pieces for each in piece.logprobs or ()] == done.logprobs
    assert [each.token_id for piece in pieces for each in piece.logprobs or ()] == done.token_ids
    assert small.generate("a man", max_new_tokens=3, logprobs=0).logprobs[0].top == []  # type: ignore[index]


def test_what_logprobs_take(small: ortgpt.Generator) -> None:
    for options, part in (
        ({"logprobs": 301}, "logprobs = 301 .*at most the vocabulary's 300"),
        ({"logprobs": -1}, "logprobs = -1"),
        ({"echo": True}, "no effect without logprobs"),
    ):
        with pytest.raises(OptionError, match=part):
            small.generate("a", **options)
    with pytest.raises(OptionError, match="echo"):
        small.stream("a", logprobs=1, echo=True)


@pytest.mark.parametrize("flavour", ["native", "portable"])
def test_choices_are_ranked_by_their_likelihood(
    small: ortgpt.Generator, small_portable: ortgpt.Generator, small_model: Any, flavour: str
) -> None:
    generator = {"native": small, "portable": small_portable}[flavour]
    prompt = "It is a truth"
    texts = [" universally acknowledged", " that", " a single man in possession", "日本"]
    prompt_ids = generator.tokenizer.encode(prompt)
    sums, tokens, sizes = [], [], []
    for text in texts:
        ids = generator.tokenizer.encode(text)
        with torch.no_grad():
            logits = small_model(torch.tensor([[*prompt_ids, *ids]])).logits[0].double()
        rows = torch.log_softmax(logits, -1)[len(prompt_ids) - 1 : -1]
        sums.append(float(rows[range(len(ids)), ids].sum()))
        tokens.append(len(ids))
        sizes.append(len(text.encode()))
    for normalize, over in (("tokens", tokens), ("bytes", sizes), ("none", [1] * 4)):
        scores = np.array(sums) / np.array(over)
        found = generator.choose(prompt, texts, normalize=normalize)
        assert [each.index for each in found] == np.argsort(-scores).tolist()
        for each in found:
            assert each.text == texts[each.index]
            assert each.logprob == pytest.approx(sums[each.index], abs=1e-3)
            assert each.score == pytest.approx(scores[each.index], abs=1e-3)
            assert each.probability == pytest.approx(float(np.exp(scores[each.index]) / np.exp(scores).sum()), abs=1e-3)
    assert generator.choose("", ["a"])[0].token_ids == generator.tokenizer.encode("a")


def test_bad_choices_are_refused(small: ortgpt.Generator) -> None:
    for texts in ([], [""], ["a", ""]):
        with pytest.raises(PromptError, match="at least one"):
            small.choose("a", texts)
    with pytest.raises(PromptError, match="a list of texts"):
        small.choose("a", "b")
    with pytest.raises(OptionError, match="normalize = 'length'"):
        small.choose("a", ["b"], normalize="length")
    with pytest.raises(ContextLengthError, match="60 tokens and a continuation of 5 exceed"):
        small.choose([1] * 60, [[1] * 5, [1]])


def test_scores_move_windows_by_the_stride_asked_for(small: ortgpt.Generator, small_model: Any) -> None:
    ids = np.random.default_rng(2).integers(300, size=150).tolist()
    whole = [0, *ids]
    score = small.score(ids, stride=16)
    for index in (0, 63, 64, 100, 149):
        begin = 0 if index < 64 else -(-(index - 63) // 16) * 16
        with torch.no_grad():
            logits = small_model(torch.tensor([whole[begin : index + 1]])).logits[0, -1].double()
        assert score.token_logprobs[index] == pytest.approx(float(torch.log_softmax(logits, -1)[ids[index]]), abs=1e-4)
    assert score.token_ids == ids
    for stride in (0, 65, 1.5, True):
        with pytest.raises(OptionError, match="stride = "):
            small.score(ids, stride=stride)  # type: ignore[arg-type]
