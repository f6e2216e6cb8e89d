"""The model for lm-evaluation-harness, without the harness: its base class and helpers are stand-ins here.

`make check-eval` compares it with the harness's own model "hf" in an environment that has the harness.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ortgpt
from ortgpt import BundleError, ContextLengthError, OptionError, PromptError
from ortgpt.decode.scoring import rolling_pairs
from ortgpt_exporter import CheckpointSource, export_bundle
from support import TEXT, greedy_ids, write_checkpoint

ROOT = Path(__file__).parents[3]


class Base:
    """What lm_eval.api.model.TemplateLM gives to a model."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *each: self.kept.append(each))


def normalized(gen_kwargs: dict[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """Return options as lm_eval.models.utils.normalize_gen_kwargs does."""
    given = {"until": [], "max_gen_toks": max_gen_toks, **gen_kwargs}
    given.setdefault("do_sample", given.get("temperature", 0) > 0)
    return given if given["do_sample"] else {**given, "temperature": 0.0}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    registered: dict[str, Any] = {}

    def register_model(name: str) -> Any:
        return lambda kind: registered.setdefault(name, kind)

    def handle_stop_sequences(until: str | list[str], eos: str | None) -> list[str]:
        return [until] if isinstance(until, str) else until

    parts: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": Base},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.models": {},
        "lm_eval.models.utils": {
            "handle_stop_sequences": handle_stop_sequences,
            "normalize_gen_kwargs": normalized,
        },
    }
    for name, members in parts.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ortgpt.integrations.lm_eval", raising=False)
    point = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]["ortgpt"]
    module_name, _, kind = point.partition(":")
    module = importlib.import_module(module_name)
    assert registered == {"ortgpt": getattr(module, kind)}
    yield registered["ortgpt"]
    sys.modules.pop(module_name, None)


def request(*args: Any) -> Any:
    return types.SimpleNamespace(args=args)


def total(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *continuation][:-1]])).logits[0, -len(continuation) :].double()
    logprobs = torch.log_softmax(logits, -1)[range(len(continuation)), continuation]
    return logprobs.sum().item(), logits.argmax(-1).tolist() == continuation


def test_log_likelihoods(adapter: Any, small: ortgpt.Generator, small_model: Any) -> None:
    lm = adapter(small)
    likely = greedy_ids(small_model, [5, 9], 3)
    requests = [(("a", "b"), [5, 9], [7, 8]), (("c", "d"), [5, 9], likely), (("e", "f"), [*range(1, 80)], [3])]
    found = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    want = [total(small_model, context[-63 - (len(ids) == 1) :], ids) for _, context, ids in requests]
    assert [each[0] for each in found] == pytest.approx([each[0] for each in want], abs=2e-4)
    assert [each[1] for each in found] == [each[1] for each in want] == [False, True, found[2][1]]
    assert sorted(lm.kept) == [
        ("loglikelihood", texts, each) for (texts, _, _), each in zip(requests, found, strict=True)
    ]
    with pytest.raises(PromptError, match="continuation = 'b' adds no token"):
        lm._loglikelihood_tokens([(("a", "b"), [5], [])], disable_tqdm=True)
    with pytest.raises(ContextLengthError, match="a continuation of 65 tokens"):
        lm._loglikelihood_tokens([(("a", "b"), [5], [7] * 65)], disable_tqdm=True)


@pytest.mark.parametrize("max_length", [None, 20])
def test_rolling_log_likelihoods(
    adapter: Any, small: ortgpt.Generator, small_model: Any, max_length: int | None
) -> None:
    lm = adapter(small, max_length=max_length)
    texts = ["", "It is", TEXT]
    found = lm.loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)
    for text, logprob in zip(texts, found, strict=True):
        pairs = rolling_pairs(0, small.tokenizer.encode(text), max_length or 64)
        assert logprob == pytest.approx(sum(total(small_model, *map(list, pair))[0] for pair in pairs), abs=1e-3)
    assert [each[0] for each in lm.kept] == ["loglikelihood_rolling"] * 3


def test_generation(adapter: Any, small: ortgpt.Generator, small_model: Any) -> None:
    lm = adapter(small, batch_size=2, max_gen_toks=9)
    contexts = ["It is a truth", "that", TEXT, "some one or"]
    greedy = []
    for context in contexts:
        ids = small.tokenizer.encode(context)[-55:]
        greedy.append(small.tokenizer.decode(greedy_ids(small_model, ids, 9, eos_token_id=0)))
    assert lm.generate_until([request(each, {}) for each in contexts], disable_tqdm=True) == greedy
    ends = [text[3:5] for text in greedy]
    requests = [
        request(context, {"until": [end, ""], "do_sample": False, "temperature": 0.0})
        for context, end in zip(contexts, ends, strict=True)
    ]
    cut = [text.partition(end)[0] for text, end in zip(greedy, ends, strict=True)]
    assert lm.generate_until(requests, disable_tqdm=True) == cut
    assert {each[0] for each in lm.kept} == {"generate_until"}
    with pytest.raises(OptionError, match=r"max_gen_toks = 64 leaves no room for a context \(accepted: at most 63\)"):
        lm.generate_until([request("a", {"max_gen_toks": 64})], disable_tqdm=True)


def test_sampling_repeats_with_the_seed_and_greedy_decoding_says_what_it_leaves(
    adapter: Any, small: ortgpt.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    sample = [request("It is", {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_gen_toks": 12})] * 3
    one, two, three = adapter(small).generate_until(sample, disable_tqdm=True)
    assert len({one, two, three}) == 3  # repeats of a request differ
    assert adapter(small, batch_size=1).generate_until(sample, disable_tqdm=True) == [one, two, three]
    assert adapter(small, seed=1235).generate_until(sample, disable_tqdm=True)[:2] == [two, three]
    assert not caplog.messages
    adapter(small).generate_until([request("a", {"top_p": 0.5, "max_gen_toks": 2})], disable_tqdm=True)
    assert caplog.messages == ["greedy decoding makes no use of top_p"]


def test_special_tokens_names_and_what_is_refused(
    adapter: Any, small_bundle: Path, small: ortgpt.Generator, tmp_path: Path
) -> None:
    lm = adapter(str(small_bundle), device="cpu", threads=1, batch_size="auto", prefix_token_id=7)
    assert (lm.prefix_token_id, lm.eot_token_id, lm.max_length, lm.batch_size) == (7, 0, 64, None)
    assert lm.tok_encode("a<|endoftext|>") == [*small.tokenizer.encode("a"), 0]
    assert lm.get_model_info()["model_dtype"] == "float32"
    for name, value in {"max_length": 65, "batch_size": 0, "prefix_token_id": 300, "max_gen_toks": 0}.items():
        with pytest.raises(OptionError, match=f"{name} = {value}"):
            adapter(small, **{name: value})
    source = CheckpointSource(write_checkpoint(tmp_path / "checkpoint"), tokenizer="none")
    with pytest.raises(BundleError, match="has no tokenizer, which the harness needs"):
        adapter(str(export_bundle(source, tmp_path / "bundle").path))
