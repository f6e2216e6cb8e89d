"""What activations each matrix of a graph meets in a text, as the sums that GPTQ weighs its errors by.

Runs the graph in ONNX Runtime, with the activations as further outputs. Knows no rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortgpt.contract import Flavour, Tensor

MAX_TOKENS = 16_384  # of a text; more changes the sums little
ROW_TOKENS = 256  # a row's logits are all computed
_MAX_BYTES = 2_000_000_000  # of sums held at once; a large graph is run several times

Hessian = npt.NDArray[np.float64]


class Calibration:
    """Gives XᵀX of the activations X (tokens, width) that are multiplied by a matrix, summed over a text.

    `model` is copied into `folder` with `activations`, by the matrices' names in the graph's order, as outputs; later
    changes of it do not count. Sums are made for as many of the next matrices as memory allows, and given once each.
    """

    def __init__(
        self,
        model: ir.Model,
        activations: Mapping[str, ir.Value],
        rows: Sequence[Sequence[int]],
        flavour: str,
        folder: Path,
    ) -> None:
        self._outputs = {name: str(value.name) for name, value in activations.items()}
        self._rows = rows
        self._flavour = flavour
        self._sums: dict[str, Hessian] = {}
        outputs, extra = model.graph.outputs, list({id(value): value for value in activations.values()}.values())
        outputs.extend(extra)
        ir.save(model, folder / "calibrate.onnx", external_data="calibrate.data")
        del outputs[-len(extra) :]
        self._session = onnxruntime.InferenceSession(folder / "calibrate.onnx", providers=["CPUExecutionProvider"])

    def hessian(self, name: str) -> Hessian:
        if name not in self._sums:
            self._sum_from(name)
        del self._outputs[name]
        return self._sums.pop(name)

    def _sum_from(self, name: str) -> None:
        names = list(self._outputs)
        chosen: list[str] = []
        widths = {value.name: value.shape[-1] for value in self._session.get_outputs()}
        held = 0
        for each in names[names.index(name) :]:
            if each in self._sums:
                continue
            held += 8 * widths[self._outputs[each]] ** 2
            if chosen and held > _MAX_BYTES:
                break
            chosen.append(each)
        options = onnxruntime.RunOptions()
        options.only_execute_path_to_fetches = True
        for row in self._rows:
            found = self._session.run([self._outputs[each] for each in chosen], self._feeds(row), options)
            for each, activation in zip(chosen, found, strict=True):
                x = activation.reshape(-1, activation.shape[-1]).astype(np.float64)
                product = x.T @ x
                self._sums[each] = self._sums[each] + product if each in self._sums else product

    def _feeds(self, ids: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        count = len(ids)
        places = np.arange(count, dtype=np.int64)[None]
        values: dict[str, npt.NDArray[Any]] = {
            Tensor.INPUT_IDS: np.array([ids], np.int64),
            Tensor.POSITION_IDS: places,
            Tensor.ATTENTION_MASK: np.ones((1, count), np.int64),
            Tensor.SEQLENS_K: np.array([count - 1], np.int32),
            Tensor.TOTAL_SEQUENCE_LENGTH: np.array(count, np.int32),
            Tensor.LOGIT_POSITIONS: places,
        }
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        slots = count if self._flavour == Flavour.NATIVE else 0
        past = {
            name: np.zeros((1, shape[1], slots, shape[3]), np.float32)
            for name, shape in shapes.items()
            if name not in values
        }
        return {name: value for name, value in values.items() if name in shapes} | past
