"""Embeddings equal the hidden states of `transformers`, whatever the batch; bundles without them say so."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from transformers import GPT2LMHeadModel, GPT2Model

import ortgpt
from ortgpt import BundleError, ClosedError, ContextLengthError, NonFiniteLogitsError, OptionError, PromptError
from ortgpt.engine.engine import Engine
from ortgpt.engine.forward import HiddenForward
from ortgpt.engine.kv_cache import FixedCache
from ortgpt_exporter import Quantization, export_bundle
from support import reseal

Ids = list[list[int]]
Floats = npt.NDArray[np.float32]
RAGGED = (5, 1, 33, 64, 2, 17, 33, 40)  # tokens; 64 is the context


def random_ids(*lengths: int) -> Ids:
    random = np.random.default_rng(3)
    return [random.integers(300, size=length).tolist() for length in lengths]


def transformers_states(model: GPT2Model, texts: Ids) -> list[Floats]:
    """Return the last hidden state (tokens, n_embd) of each text, computed alone."""
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts]


@pytest.fixture(scope="module")
def texts() -> Ids:
    return random_ids(*RAGGED)


@pytest.fixture(scope="module")
def states(small_checkpoint: Path, texts: Ids) -> list[Floats]:
    return transformers_states(GPT2Model.from_pretrained(small_checkpoint).eval(), texts)


def unit(vectors: Floats) -> Floats:
    return torch.nn.functional.normalize(torch.from_numpy(vectors), dim=-1).numpy()


def test_each_pooling_is_that_of_the_last_hidden_state_of_transformers(
    small: ortgpt.Generator, texts: Ids, states: list[Floats]
) -> None:
    last = np.stack([state[-1] for state in states])
    mean = np.stack([state.mean(0) for state in states])
    for pooled, want in (
        (small.embed(texts, normalize=False), last),
        (small.embed(texts, pooling="mean", normalize=False), mean),
        (small.embed(texts), unit(last)),
        (small.embed(texts, pooling="mean"), unit(mean)),
    ):
        assert pooled.dtype == np.float32
        assert pooled.shape == (8, 48)
        assert np.abs(pooled - want).max() < 2e-5
    for vectors, state in zip(small.embed(texts, pooling="none", normalize=False), states, strict=True):
        assert vectors.shape == state.shape
        assert np.abs(vectors - state).max() < 2e-5
    for vectors, state in zip(small.embed(texts, pooling="none"), states, strict=True):
        assert np.abs(vectors - unit(state)).max() < 2e-5


def test_a_text_is_embedded_as_its_ids_are(small: ortgpt.Generator) -> None:
    words = ["It is a truth", "Café — 日本語 👩‍👩‍👧", " "]
    by_ids = small.embed([small.tokenizer.encode(text) for text in words])
    assert np.array_equal(small.embed(text for text in words), by_ids)
    assert np.array_equal(small.embed([np.array(small.tokenizer.encode(words[0]))])[0], by_ids[0])


def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch(small: ortgpt.Generator, texts: Ids) -> None:
    together, tokens = small.embed(texts), small.embed(texts, pooling="none")
    for budget in (1, 40, 70, 200, 600):
        assert np.array_equal(small.embed(texts, batch_tokens=budget), together)
    for index, ids in enumerate(texts):
        assert np.array_equal(small.embed([ids])[0], together[index])
        assert np.array_equal(small.embed([ids], pooling="none")[0], tokens[index])
        assert np.array_equal(tokens[index][-1], together[index])
    backwards = small.embed(texts[::-1])
    assert np.array_equal(backwards[::-1], together)


def test_batches_keep_within_the_tokens_allowed_and_the_default_within_memory(
    small: ortgpt.Generator, texts: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    original = Engine.hidden_states

    def spy(self: Engine, prompts: Ids, positions: Any) -> Floats:
        sizes.append([len(ids) for ids in prompts])
        return original(self, prompts, positions)

    monkeypatch.setattr(Engine, "hidden_states", spy)
    small.embed(texts, batch_tokens=70)
    assert sizes == [[1, 2, 5, 17], [33, 33], [40], [64]]
    sizes.clear()
    small.embed([*texts, *texts])
    assert sizes == [[1, 1, 2, 2, 5, 5, 17, 17], [33, 33, 33, 33, 40, 40], [64, 64]]  # at most 256 positions
    sizes.clear()
    monkeypatch.setattr("ortgpt.embedding._BATCH_BYTES", 2**20)
    small.embed(texts)
    assert len(sizes) > 1
    assert [length for lengths in sizes for length in lengths] == sorted(RAGGED)


def test_the_head_computes_no_logits(small: ortgpt.Generator, texts: Ids) -> None:
    cache = small.engine.new_cache(1, 64)
    assert isinstance(cache, FixedCache)
    forward = HiddenForward(small.engine.session, small.engine.config, cache, 64, 64)
    forward.input_ids[0] = texts[3]
    forward.logit_positions[0] = np.arange(64)
    forward._binding.bind_output("logits")
    forward.run(np.array([64], np.int32))
    assert forward._binding.get_outputs()[-1].shape() == [1, 0, 300]


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_hidden_states_of_other_precisions_give_the_bundles_own_logits(
    dtype: str, small_checkpoint: Path, small_model: GPT2LMHeadModel, texts: Ids, states: list[Floats], tmp_path: Path
) -> None:
    quantization = None if dtype == "float16" else Quantization(dtype=dtype, head_dtype="int8", max_perplexity_ratio=2)
    bundle = export_bundle(small_checkpoint, tmp_path / "bundle", dtype=dtype, quantization=quantization)
    head = small_model.lm_head.weight.detach().numpy()
    with ortgpt.load(bundle.path) as generator:
        tokens = generator.embed(texts, pooling="none", normalize=False)
        for ids, hidden, state in zip(texts, tokens, states, strict=True):
            cache = generator.engine.new_cache(1, len(ids))
            logits = generator.engine.prefill(cache, [ids], np.arange(len(ids))[None])[0]
            assert np.abs(hidden @ head.T - logits).max() < 0.02 * np.abs(logits).max()
            similarity = (unit(hidden) * unit(state)).sum(1)
            assert similarity.min() > {"float16": 0.9999, "int8": 0.99, "int4": 0.5}[dtype]
        assert np.array_equal(generator.embed(texts, normalize=False), np.stack([each[-1] for each in tokens]))


def test_a_rows_own_length_chooses_the_graph(fast_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_ids(31, 32, 3, 50, 31)
    with ortgpt.load(fast_bundle) as generator:
        engine = generator.engine
        assert engine.prefill_graph is not None
        together = generator.embed(texts)
        alone = np.concatenate([generator.embed([ids]) for ids in texts])
        assert np.array_equal(together, alone)
        engine.prefill_graph = None
        by_decoder = generator.embed(texts)
        assert [np.array_equal(*pair) for pair in zip(together, by_decoder, strict=True)] == [
            len(ids) < 32 for ids in texts
        ]
        assert np.abs(together - by_decoder).max() < 0.1


def test_no_texts_give_no_rows(small: ortgpt.Generator) -> None:
    for empty in (small.embed([]), small.embed([], pooling="mean")):
        assert empty.dtype == np.float32
        assert empty.shape == (0, 48)
    assert small.embed([], pooling="none") == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            {"texts": "one"},
            PromptError,
            r"texts = 'one' \(accepted: a list of texts or token ids; for one text, \[text\]\)",
        ),
        ({"texts": 5}, PromptError, r"texts = 5 \(accepted: a list"),
        ({"texts": [[1], ""]}, PromptError, r"texts\[1\] is empty \(accepted: at least one token\)"),
        ({"texts": [[1], []]}, PromptError, r"texts\[1\] is empty"),
        ({"texts": [1, 2]}, PromptError, r"texts\[0\] = 1 \(accepted: a text, or a sequence of token ids\)"),
        ({"texts": [[1], [300]]}, PromptError, r"texts\[1\]\[0\]: token id 300 is not in the vocabulary"),
        ({"texts": [[1], [1] * 65]}, ContextLengthError, r"texts\[1\] has 65 tokens, and the context is 64 tokens"),
        ({"pooling": "max"}, OptionError, r"pooling = 'max' \(accepted: last, mean, none\)"),
        ({"pooling": None}, OptionError, "pooling = None"),
        ({"pooling": ["last"]}, OptionError, r"pooling = \['last'\]"),
        ({"normalize": 1}, OptionError, r"normalize = 1 \(accepted: True, False\)"),
        ({"batch_tokens": 0}, OptionError, "batch_tokens = 0"),
    ],
)
def test_what_is_refused(small: ortgpt.Generator, call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        small.embed(**({"texts": [[1]]} | call))


def test_nothing_is_computed_before_every_text_was_checked(
    small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "hidden_states", lambda *args: pytest.fail("computed"))
    with pytest.raises(ContextLengthError):
        small.embed([[1], [1] * 65])


def test_a_hidden_state_that_is_not_finite_is_an_error(small_checkpoint: Path, tmp_path: Path) -> None:
    bundle = export_bundle(small_checkpoint, tmp_path / "bundle").path
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    (bias,) = (each for each in model.graph.initializer if each.name == "ln_f.bias")
    values = onnx.numpy_helper.to_array(bias).copy()
    values[7] = math.nan
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    onnx.save(model, bundle / "model.onnx")
    reseal(bundle)
    with ortgpt.load(bundle) as generator:
        for pooling, count, size in (("last", 1, 48), ("mean", 2, 96), ("none", 2, 96)):
            with pytest.raises(
                NonFiniteLogitsError, match=rf"{count} of {size} numbers of hidden states are not finite in texts\[0\]"
            ):
                generator.embed([[1, 2]], pooling=pooling)  # type: ignore[call-overload]


def write_older(bundle: Path, out: Path) -> Path:
    """Copy a bundle and take its hidden states away, as bundles of format 1.3 and older have none."""
    shutil.copytree(bundle, out)
    model = onnx.load(out / "model.onnx", load_external_data=False)
    graph = model.graph
    (gather,) = (node for node in graph.node if "logit_rows" in node.input)
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name == gather.output[0]:
                node.input[place] = gather.input[0]
    graph.node.remove(gather)
    graph.output.remove(next(each for each in graph.output if each.name == "hidden_states"))
    graph.input.remove(next(each for each in graph.input if each.name == "logit_rows"))
    positions = next(each for each in graph.input if each.name == "logit_positions")
    positions.type.tensor_type.shape.dim[1].dim_param = "logit_count"
    del graph.value_info[:]
    onnx.save(model, out / "model.onnx")

    def change(manifest: dict[str, Any]) -> None:
        manifest["format"]["minor"] = 3
        manifest["graphs"][0]["outputs"].remove("hidden_states")
        manifest["graphs"][0]["inputs"].remove("logit_rows")

    reseal(out, change)
    return out


def test_an_older_bundle_generates_and_says_that_it_has_no_hidden_states(
    small: ortgpt.Generator, small_bundle: Path, tmp_path: Path
) -> None:
    older = write_older(small_bundle, tmp_path / "older")
    with ortgpt.load(older) as generator:
        prompts = ["It is a truth", "Emma"]
        kept = [each.token_ids for each in small.generate_batch(prompts, max_new_tokens=9)]
        assert [each.token_ids for each in generator.generate_batch(prompts, max_new_tokens=9)] == kept
        assert generator.score("It is a truth") == small.score("It is a truth")
        with pytest.raises(
            BundleError, match="older has no hidden states, since an earlier version exported it; export"
        ):
            generator.embed(["It is a truth"])


def test_a_graph_with_hidden_states_that_the_manifest_does_not_list_is_refused(
    small_bundle: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(small_bundle, bundle)
    reseal(bundle, lambda manifest: manifest["graphs"][0]["outputs"].remove("hidden_states"))
    with pytest.raises(
        BundleError, match=r"hidden_states is float32 \(batch_size, hidden_count, 48\), expected absent"
    ):
        ortgpt.load(bundle)


def test_a_portable_bundle_says_that_a_native_one_is_needed(small_portable: ortgpt.Generator) -> None:
    with pytest.raises(
        BundleError, match="is portable, and only native bundles have hidden states; export a native one"
    ):
        small_portable.embed(["It is a truth"])


@pytest.fixture
def own(small_bundle: Path) -> Iterator[ortgpt.Generator]:
    with ortgpt.load(small_bundle) as generator:
        yield generator


def test_several_threads_embed_at_once(own: ortgpt.Generator, texts: Ids) -> None:
    want = own.embed(texts)
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(found, want) for found in pool.map(lambda _: own.embed(texts), range(12)))


def test_a_closed_generator_says_so(own: ortgpt.Generator) -> None:
    own.close()
    with pytest.raises(ClosedError, match="closed"):
        own.embed([[1]])
