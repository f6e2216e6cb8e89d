"""Sum XᵀX over the activations X of a text that each matrix of a graph multiplies: what GPTQ weighs its errors by.

Runs the float32 graph in ONNX Runtime, with the activations as further outputs. Knows no rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortgpt.contract import MINIMUM_ONNXRUNTIME, Flavour, Tensor
from ortgpt.ort.package import import_onnxruntime

MAX_TOKENS = 16_384  # of a text; more tokens change the sums little
ROW_TOKENS = 256  # the logits of a whole row are computed
_MAX_BYTES = 2_000_000_000  # of the sums in memory; a large graph is run several times

Hessian = npt.NDArray[np.float64]


class Calibration:
    """Sums over one text, for the matrices of one graph. As many sums are made at once as memory allows."""

    def __init__(
        self,
        model: ir.Model,
        activations: Mapping[str, ir.Value],
        rows: Sequence[Sequence[int]],
        flavour: str,
        folder: Path,
        *,
        wanted: Collection[str],
    ) -> None:
        """Copy `model` into `folder` and open the copy; later changes of the model do not count.

        `activations` has the left factor of each matrix by the matrix's name, in the graph's order. All of them become
        outputs, so that ONNX Runtime fuses the same nodes whatever is `wanted`, the names that hessian() will get.
        """
        self._outputs = {name: str(value.name) for name, value in activations.items() if name in wanted}
        self._rows = rows
        self._flavour = flavour
        self._sums: dict[str, Hessian] = {}
        outputs, extra = model.graph.outputs, list({id(value): value for value in activations.values()}.values())
        outputs.extend(extra)
        ir.save(model, folder / "calibrate.onnx", external_data="calibrate.data")
        outputs[-len(extra) :] = []  # after `del`, onnx_ir would still take them for outputs and not save their shapes
        ort = import_onnxruntime(MINIMUM_ONNXRUNTIME)
        self._session = ort.InferenceSession(folder / "calibrate.onnx", providers=["CPUExecutionProvider"])
        self._options = ort.RunOptions()
        self._options.only_execute_path_to_fetches = True

    def hessian(self, name: str) -> Hessian:
        """Return XᵀX (width, width) for the matrix called `name`. Each sum can be taken once."""
        if name not in self._sums:
            self._sum_from(name)
        del self._outputs[name]
        return self._sums.pop(name)

    def _sum_from(self, name: str) -> None:
        """Sum for this matrix, and for those after it while they fit into memory."""
        names = list(self._outputs)
        chosen: list[str] = []
        widths = {value.name: value.shape[-1] for value in self._session.get_outputs()}
        size_bytes = 0
        for other in names[names.index(name) :]:
            if other in self._sums:
                continue
            size_bytes += 8 * widths[self._outputs[other]] ** 2
            if chosen and size_bytes > _MAX_BYTES:
                break
            chosen.append(other)
        for row in self._rows:
            activations = self._session.run([self._outputs[other] for other in chosen], self._feeds(row), self._options)
            for other, activation in zip(chosen, activations, strict=True):
                x = activation.reshape(-1, activation.shape[-1]).astype(np.float64)
                product = x.T @ x
                self._sums[other] = self._sums[other] + product if other in self._sums else product

    def _feeds(self, ids: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        count = len(ids)
        positions = np.arange(count, dtype=np.int64)[None]
        values: dict[str, npt.NDArray[Any]] = {
            Tensor.INPUT_IDS: np.array([ids], np.int64),
            Tensor.POSITION_IDS: positions,
            Tensor.ATTENTION_MASK: np.ones((1, count), np.int64),
            Tensor.SEQLENS_K: np.array([count - 1], np.int32),
            Tensor.TOTAL_SEQUENCE_LENGTH: np.array(count, np.int32),
            Tensor.LOGIT_POSITIONS: positions,
            Tensor.LOGIT_ROWS: positions[0],
        }
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        length = count if self._flavour == Flavour.NATIVE else 0
        past = {
            name: np.zeros((1, shape[1], length, shape[3]), np.float32)
            for name, shape in shapes.items()
            if name not in values
        }
        return {name: value for name, value in values.items() if name in shapes} | past
