"""Clean an exported graph up; a native one gets the operators that ONNX Runtime has a fused kernel for.

There the bias joins the tanh GELU, and in float16, for a GPU, the residual additions join the LayerNormalization behind
them. Changes no value.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import fold_constants
from onnxscript.rewriter import RewriteRuleSet, pattern, rewrite
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_layer_normalization

from ortgpt.contract import DType, Flavour
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.graph.torch_modules import MICROSOFT
from ortgpt_models import GPTConfig

_MOST_CONSTANT = 8  # numbers; shapes and axes are no longer, no weight is shorter


def optimize_graph(model: ir.Model, config: GPTConfig, flavour: str, dtype: str) -> None:
    """Rewrite in place, drop the exporter's notes on where in the source a node came from, declare the lowest versions.

    Raises ExportError when a fusion matched fewer or more places than the network has.
    """
    _simplify(model)
    if flavour == Flavour.NATIVE:
        _fuse(model, config, dtype)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    _lower_versions(model)


def _simplify(model: ir.Model) -> None:
    """Fold constants, drop identities and what nothing uses, compute nothing twice.

    As onnxscript's optimize_ir, but weights that happen to be equal, biases of a new model say, stay apart: whoever
    changes one by its name must find it.
    """
    for _ in range(2):  # a rewrite may leave more to fold
        fold_constants(model, onnx_shape_inference=True)
        rewrite(model)
    ir.passes.Sequential(
        RemoveUnusedNodesPass(),
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        DeduplicateInitializersPass(size_limit=_MOST_CONSTANT),
        CommonSubexpressionEliminationPass(),
        NameFixPass(),
    )(model)


def _fuse(model: ir.Model, config: GPTConfig, dtype: str) -> None:
    counts = {"activation": RewriteRuleSet([pattern.RewriteRule(_bias_gelu, _fast_gelu)]).apply_to_model(model)}
    expected = {"activation": config.n_layer if config.activation_function == "gelu_new" else 0}
    if dtype == DType.FLOAT16:  # on a CPU the fused operator is slower than its parts
        counts["residual"] = fuse_skip_layer_normalization(model)
        model.graph.sort()  # a fused node stands where its last part did, behind what uses its sum
        expected["residual"] = 2 * config.n_layer + 1
    if counts != expected:
        raise ExportError(f"graph fusions matched {counts}; this network has {expected}")


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


def _bias_gelu(op: Any, x: Any, bias: Any) -> Any:
    return op.Gelu(op.Add(x, bias), approximate="tanh")


def _fast_gelu(op: Any, x: Any, bias: Any) -> Any:
    return op.FastGelu(x, bias, _domain=MICROSOFT)
