"""Weights that no file holds: their values, and whether their memory is freed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

import ortgpt
from ortgpt.bundle.folder import open_bundle
from ortgpt.ort.made_weights import MadeWeights
from ortgpt.ort.whole_rows import read_whole_rows, whole_rows


def halves(integers: Any) -> Any:
    return (integers[..., ::2] | integers[..., 1::2] << 4).astype(np.uint8)


def test_known_rows_in_four_bits() -> None:
    # Two rows of five weights in blocks of four; the last block ends with three integers for zero.
    integers = np.array([[[8, 9, 7, 15], [0, 8, 8, 8]], [[8, 8, 8, 8], [8, 8, 8, 8]]], np.uint8)
    packed = halves(integers)
    scales = np.array([[1, 0.5], [2, 3]], np.float32)
    bytes_, row_scales = whole_rows(packed, scales, bits=4, columns=5)
    # The weights are 0, 1, -1, 7 and -4; -128 stands for 7.
    nearest = [0, -18, 18, -128, 73]
    assert bytes_.T.tolist() == [nearest, [0, 0, 0, 0, 0]]
    fitted = (0 - 18 - 18 - 128 * 7 - 73 * 4) / (18**2 + 18**2 + 128**2 + 73**2)
    assert row_scales.tolist() == pytest.approx([fitted, 0])


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_many_chunks_are_nearest_to_the_weights(bits: int) -> None:
    rng = np.random.default_rng(2)
    integers = rng.integers(2**bits, size=(300, 3, 16)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, size=(300, 3)).astype(np.float32)
    packed = integers if bits == 8 else halves(integers)
    weights = ((integers.astype(float) - 2 ** (bits - 1)) * scales[..., None]).reshape(300, 48)[:, :40]
    bytes_, row_scales = whole_rows(packed, scales, bits=bits, columns=40)
    assert np.allclose(np.abs(row_scales), np.abs(weights).max(axis=1) / 128, rtol=0.01)
    errors = bytes_.T * row_scales[:, None].astype(float) - weights
    assert np.square(errors).mean() ** 0.5 < 0.3 * np.abs(row_scales).mean()  # of numbers rounded to the nearest: 0.289
    assert np.abs((bytes_.T * errors).sum(axis=1)).max() < 0.1  # the scale with the least squared error


class ReadingSession:
    """A session that has copied nothing: it returns what the weights add up to."""

    def __init__(self, made: MadeWeights) -> None:
        self._made = made

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="total_sequence_length", shape=[], type="tensor(int32)")]

    def run(self, names: list[str], feeds: dict[str, Any]) -> list[Any]:
        return [np.array([array.astype(np.int64).sum() for array in self._made.arrays.values()])]


@pytest.mark.parametrize("copies", [True, False])
def test_matrices_are_freed_only_if_the_session_has_copies(fast_bundle: Path, copies: bool) -> None:
    bundle = open_bundle(fast_bundle)
    graph = bundle.manifest.graphs[1]
    made, options = MadeWeights(bundle, graph), onnxruntime.SessionOptions()
    matrices = {matrix.name for matrix in graph.made}
    scales = {matrix.scales_name for matrix in graph.made}
    if copies:
        made.give_to(onnxruntime, options)
        made.free_if_copied(onnxruntime.InferenceSession(str(fast_bundle / graph.file), options))
        assert made.arrays.keys() == scales
        return
    made.free_if_copied(ReadingSession(made))
    assert made.arrays.keys() == scales | matrices
    for matrix in graph.made:
        assert np.array_equal(made.arrays[matrix.name], read_whole_rows(fast_bundle, matrix)[0])
        assert made.arrays[matrix.name].any()


def test_a_graph_computes_the_same_whether_or_not_they_are_freed(
    fast_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [int(each) for each in np.random.default_rng(0).integers(290, size=40)]

    def logits() -> Any:
        with ortgpt.load(fast_bundle) as generator:
            return generator.engine.prefill(generator.engine.new_cache(1, 64), [prompt])

    freed = logits()
    monkeypatch.setattr(MadeWeights, "free_if_copied", lambda made, handle: None)
    assert np.array_equal(logits(), freed)
