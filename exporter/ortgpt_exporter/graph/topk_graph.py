"""Make the graph that finds the largest logits of each row on the device that computed them. Knows no network."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgpt.contract import DType, Spec, Tensor, topk_tensors

_OPSET, _IR_VERSION = 17, 8
_TYPES = {DType.FLOAT32: TensorProto.FLOAT, DType.INT64: TensorProto.INT64}


def topk_graph(vocab_size: int, allowed_vocab_size: int) -> onnx.ModelProto:
    """Return a graph from float32 logits (batch, 1, vocab_size) to each row's largest (see contract.topk_tensors).

    Ids from `allowed_vocab_size` on are left out. A repetition penalty divides positive logits and multiplies negative
    ones (Keskar et al. 2019, arXiv:1909.05858), as `transformers` does.
    """
    inputs, outputs = topk_tensors(vocab_size, allowed_vocab_size)
    constants = {
        "zero": np.float32(0),
        "first": np.array([0], np.int64),
        "end": np.array([allowed_vocab_size], np.int64),
        "middle_axis": np.array([1], np.int64),
        "count": np.array([outputs[Tensor.TOP_IDS][1][1]], np.int64),
    }
    make = helper.make_node
    nodes = [
        make("Squeeze", [Tensor.LOGITS, "middle_axis"], ["rows"]),
        make("Mul", ["rows", "zero"], ["zeros_or_nan"]),
        make("ReduceSum", ["zeros_or_nan", "middle_axis"], [Tensor.NON_FINITE], keepdims=0),
        make("Slice", ["rows", "first", "end", "middle_axis"], ["allowed"]),
        make("GatherElements", ["allowed", Tensor.PENALIZED_IDS], ["chosen"], axis=1),
        make("Less", ["chosen", "zero"], ["negative"]),
        make("Mul", ["chosen", Tensor.PENALTIES], ["multiplied"]),
        make("Div", ["chosen", Tensor.PENALTIES], ["divided"]),
        make("Where", ["negative", "multiplied", "divided"], ["penalized"]),
        make("ScatterElements", ["allowed", Tensor.PENALIZED_IDS, "penalized"], ["scores"], axis=1),
        make("TopK", ["scores", "count"], [Tensor.TOP_LOGITS, Tensor.TOP_IDS], axis=1, largest=1, sorted=1),
    ]
    graph = helper.make_graph(
        nodes,
        "select",
        [_value(*item) for item in inputs.items()],
        [_value(*item) for item in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model


def _value(name: str, spec: Spec) -> onnx.ValueInfoProto:
    dtype, axes = spec
    return helper.make_tensor_value_info(name, _TYPES[dtype], list(axes))
