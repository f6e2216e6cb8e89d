"""Simplify an exported graph, and give a native graph the operators that ONNX Runtime has fused kernels for.

Bias and tanh GELU become one operator. In float16, for a GPU, a residual addition and the LayerNormalization after it
become one, too. Changes no value and knows no files.
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
from ortgpt_models.config import PRE, TANH_GELUS

_MAX_CONSTANT = 8  # numbers; shapes and axes have at most so many, and weights have more


def optimize_graph(model: ir.Model, config: GPTConfig, flavour: str, dtype: str) -> None:
    """Rewrite a graph in place, remove torch's notes on its source code, and declare the lowest versions.

    Raises ExportError if a fusion matched fewer or more places than the network has.
    """
    _simplify(model)
    if flavour == Flavour.NATIVE:
        _fuse(model, config, dtype)
    RemoveUnusedNodesPass()(model)
    ClearMetadataAndDocStringPass()(model)
    _lower_versions(model)


def _simplify(model: ir.Model) -> None:
    """Fold constants, remove identities and unused nodes, and merge equal subexpressions.

    Does the same as onnxscript's optimize_ir, except that equal weights, such as the biases of a new model, are not
    merged: quantisation finds each by its name.
    """
    for _ in range(2):  # a rewrite may make more nodes foldable
        fold_constants(model, onnx_shape_inference=True)
        rewrite(model)
    ir.passes.Sequential(
        RemoveUnusedNodesPass(),
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        DeduplicateInitializersPass(size_limit=_MAX_CONSTANT),
        CommonSubexpressionEliminationPass(),
        NameFixPass(),
    )(model)


def _fuse(model: ir.Model, config: GPTConfig, dtype: str) -> None:
    counts = {"activation": RewriteRuleSet([pattern.RewriteRule(_bias_gelu, _fast_gelu)]).apply_to_model(model)}
    expected = {"activation": config.n_layer if config.activation_function in TANH_GELUS else 0}
    if dtype == DType.FLOAT16:  # on a CPU the fused operator is slower than the two
        counts["residual"] = fuse_skip_layer_normalization(model)
        model.graph.sort()  # a fused node takes its last part's place, after the nodes that read its sum
        # Two a layer; with pre-norm, the sum of the embeddings has a LayerNorm after it, too.
        expected["residual"] = 2 * config.n_layer + (config.norm == PRE)
    if counts != expected:
        raise ExportError(f"graph fusions matched {counts}; this network has {expected}")


def _lower_versions(model: ir.Model) -> None:
    """Declare the first opset that has every operator in the version used, and the first IR version with that opset."""
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
