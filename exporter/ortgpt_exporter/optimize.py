"""Rewrite an exported graph into the operators that ONNX Runtime has a fused kernel for. Changes no value.

The residual additions join the LayerNormalization behind them, the bias joins the tanh GELU, and the head reads the
token embedding as it lies instead of a transposed second copy.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass
from onnxscript.optimizer import optimize_ir
from onnxscript.rewriter import RewriteRuleSet, pattern
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization

from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.export import MICROSOFT


def optimize_native(model: ir.Model, *, n_layer: int, tanh_gelu: bool) -> None:
    """Fuse in place, drop the exporter's notes on where in the source each node came from, declare the lowest versions.

    Raises ExportError when a fusion matched fewer or more places than the network has.
    """
    head = RewriteRuleSet([pattern.RewriteRule(_transposed_head, _tied_head)]).apply_to_model(model)
    optimize_ir(model)  # constants folded, identities gone
    counts = {
        "head": head,
        "activation": RewriteRuleSet([pattern.RewriteRule(_bias_gelu, _fast_gelu)]).apply_to_model(model),
        "residual": fuse_skip_layer_normalization(model),
    }
    expected = {"head": 1, "activation": n_layer if tanh_gelu else 0, "residual": 2 * n_layer}
    if counts != expected:
        raise ExportError(f"graph fusions matched {counts}; this network has {expected}")
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    _lower_versions(model)


def _lower_versions(model: ir.Model) -> None:
    """Declare the first opset that has every operator as it is used here, and the first IR version with that opset."""
    exported = model.opset_imports[""]
    model.opset_imports[""] = max(
        onnx.defs.get_schema(node.op_type, exported, node.domain).since_version
        for node in model.graph
        if node.domain == ""
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    model.ir_version = onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True)


def _transposed_head(op: Any, x: Any, weight: Any) -> Any:
    return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))


def _tied_head(op: Any, x: Any, weight: Any) -> Any:
    return op.FusedMatMul(x, weight, transB=1, _domain=MICROSOFT)


def _bias_gelu(op: Any, x: Any, bias: Any) -> Any:
    return op.Gelu(op.Add(x, bias), approximate="tanh")


def _fast_gelu(op: Any, x: Any, bias: Any) -> Any:
    return op.FastGelu(x, bias, _domain=MICROSOFT)
