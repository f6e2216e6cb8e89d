"""The weights that a graph names and no file holds: made before it is opened, and freed if it has copied them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import GraphSpec
from ortgpt.contract import Tensor
from ortgpt.errors import BundleError, shown
from ortgpt.native_call import native_call
from ortgpt.ort.whole_rows import read_whole_rows

_TYPES = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}


class MadeWeights:
    """Their memory. It has to live as long as the session reads it."""

    def __init__(self, bundle: Bundle, graph: GraphSpec) -> None:
        """Make all weights of a graph. Raises BundleError for a manifest that does not fit the files."""
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self._folder, self._matrices = bundle.path, graph.made
        for matrix in graph.made:
            if matrix.file not in bundle.manifest.files:
                path = bundle.path / graph.file
                raise BundleError(f"{path} is made of {shown(matrix.file)}, which is not in the manifest")
            self.arrays[matrix.name], self.arrays[matrix.scales_name] = read_whole_rows(bundle.path, matrix)

    def give_to(self, ort: ModuleType, options: Any) -> None:
        """Let a session that is opened with these options read the weights."""
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in self.arrays.values()]
        options.add_external_initializers(list(self.arrays), values)

    def free_if_copied(self, handle: Any) -> None:
        """Free the matrices if the open graph has copies of its own, in the order that this CPU wants.

        ONNX Runtime does not tell, and its versions differ. So one token is computed twice, the second time with
        matrices of zeros: if the result is the same, the graph does not read them.
        """
        before = _one_token(handle)
        for matrix in self._matrices:
            self.arrays[matrix.name].fill(0)
        is_copied = np.array_equal(before, _one_token(handle))
        for matrix in self._matrices:
            if is_copied:
                del self.arrays[matrix.name]
            else:
                self.arrays[matrix.name][...], _ = read_whole_rows(self._folder, matrix)


def _one_token(handle: Any) -> npt.NDArray[Any]:
    """Return the logits that a graph for prompts computes for the token 0 on an empty cache."""
    feeds = {}
    for each in handle.get_inputs():
        shape = [size if isinstance(size, int) else 1 for size in each.shape]
        feeds[each.name] = np.zeros(shape, _TYPES[each.type])
    feeds[Tensor.TOTAL_SEQUENCE_LENGTH] += 1
    with native_call:
        logits: npt.NDArray[Any] = handle.run([Tensor.LOGITS], feeds)[0]
    return logits
