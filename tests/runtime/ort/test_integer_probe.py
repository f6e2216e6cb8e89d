"""The product that tells whether bytes are multiplied exactly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortgpt.ort import integer_probe as integers
from ortgpt.ort.integer_probe import multiplies_exactly


def test_the_product_is_one_node_that_multiplies_unsigned_by_signed_bytes() -> None:
    model = onnx.load_model_from_string(integers._PRODUCT)
    assert [(node.op_type, list(node.input)) for node in model.graph.node] == [("MatMulInteger", ["a", "b", "z"])]
    kinds = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    assert kinds == [onnx.TensorProto.UINT8, onnx.TensorProto.INT32]
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert weights["b"].dtype == np.int8
    assert np.array_equal(weights["b"], np.full((16, 16), 127))
    assert weights["z"] == 0


def test_this_machine_with_its_setting_is_exact() -> None:
    """Where the product is not exact, the setting that a session then gets makes it so."""
    options = onnxruntime.SessionOptions()
    if not multiplies_exactly(onnxruntime):
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(integers._PRODUCT, options, providers=["CPUExecutionProvider"])
    for rows in (1, 2, 9):
        product = session.run(None, {"a": np.full((rows, 16), 255, np.uint8)})[0]
        assert (product == 255 * 127 * 16).all()


@pytest.mark.parametrize(("saturated", "exact"), [(None, True), (1, False), (4, False)])
def test_one_wrong_number_for_one_row_or_for_several_is_seen(saturated: int | None, exact: bool) -> None:
    class Session:
        def __init__(self, *args: object, **keywords: object) -> None: ...

        def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
            product = feeds["a"].astype(np.int32) @ np.full((16, 16), 127, np.int32)
            if len(product) == saturated:
                product[0, 5] -= 1
            return [product]

    fake: Any = SimpleNamespace(InferenceSession=Session, SessionOptions=onnxruntime.SessionOptions)
    assert multiplies_exactly(fake) is exact
