"""Export a PyTorch `GPT` to an ONNX graph with the tensors and named axes of the contract. Knows no files."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from ortgpt.contract import DType, Flavour, KVShape, Spec, Task, classifier_tensors, graph_tensors
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.graph.classifier_modules import CLASSIFIER_GRAPHS, ClassifierGraph
from ortgpt_exporter.graph.torch_modules import ATTENTION, GRAPHS, MICROSOFT, FlavouredGraph, WideHead
from ortgpt_models import GPT, ClassifierConfig, GPTClassifier, GPTConfig
from ortgpt_models.gpt import Conv1D
from ortgpt_models.quiet import quiet_warnings

# Native: the first opset with Gelu, so that the activation is one node to recognise; optimize_graph() declares a lower
# one where it can. Portable: an opset without Gelu, whose parts every runtime has.
_OPSETS = {Flavour.NATIVE: 20, Flavour.PORTABLE: 18}
_HEAD_DIM_MULTIPLE = 8  # of GroupQueryAttention
_one_export = threading.Lock()


def export_graph(gpt: GPT, flavour: str, dtype: str) -> ir.Model:
    """Export `gpt`, unchanged, as a graph that computes and caches in `dtype`, "float32" or "float16".

    Raises ExportError if the attention is not that of the flavour, or if a weight is too large for float16. Whether the
    tensors have the contract's types and axes is checked where the runtime opens the file.
    """
    module = GRAPHS[flavour](_adapted(gpt, flavour, dtype, wide_head=True))
    return _export(module, flavour, gpt.config.n_layer, *tensors_of(gpt.config, flavour, dtype))


def export_classifier(classifier: GPTClassifier, flavour: str, dtype: str) -> ir.Model:
    """Export a classifier, unchanged, as a graph whose body computes in `dtype`; raises as export_graph() does."""
    config, gpt = classifier.config, classifier.gpt
    head = {f"{config.head_name}.{name}": tensor for name, tensor in classifier.named_parameters(recurse=False)}
    body = _adapted(gpt, flavour, dtype, wide_head=False)
    module = CLASSIFIER_GRAPHS[flavour](GPTClassifier(body, config, head))
    return _export(module, flavour, gpt.config.n_layer, *classifier_tensors_of(config))


def classifier_tensors_of(config: ClassifierConfig) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the contract's inputs and outputs for a classifier."""
    return classifier_tensors(task_of(config), len(config.labels))


def task_of(config: ClassifierConfig) -> str:
    """Return the task of a classifier."""
    return Task.TOKEN_CLASSIFICATION if config.labels_tokens else Task.TEXT_CLASSIFICATION


def _adapted(gpt: GPT, flavour: str, dtype: str, *, wide_head: bool) -> GPT:
    """Return the network in `dtype`, with heads as wide as the flavour's attention takes them."""
    head_dim = cache_head_dim(gpt.config, flavour)
    if dtype == DType.FLOAT16:
        gpt = halve(gpt, wide_head=wide_head)
    return gpt if head_dim == gpt.config.head_dim else pad_heads(gpt, head_dim)


def _export(
    module: FlavouredGraph | ClassifierGraph,
    flavour: str,
    n_layer: int,
    inputs: dict[str, Spec],
    outputs: dict[str, Spec],
) -> ir.Model:
    module.eval()
    with _quiet():
        program = torch.onnx.export(
            module,
            module.example,
            dynamo=True,
            opset_version=_OPSETS[flavour],
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=module.dynamic_shapes,
            verbose=False,
            optimize=False,  # its folding would store the transposed head of a small model as a second copy
        )
    assert program is not None  # dynamo=True always returns a program
    model = program.model
    for value in list(model.graph.initializers.values()):
        assert value.name is not None
        value.name = value.name.removeprefix("gpt.")  # those of GPT-2 checkpoints
    _name_axes(model, inputs | outputs)
    check_operators(model, flavour, n_layer)
    return model


def _name_axes(model: ir.Model, specs: dict[str, Spec]) -> None:
    """Replace torch's own names of dynamic axes, such as sums of others, by the contract's."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        axes = specs[value.name or ""][1]
        if value.shape is not None and len(value.shape) == len(axes):
            value.shape = ir.Shape(
                [
                    axis if isinstance(axis, str) and not isinstance(dim, int) else dim
                    for dim, axis in zip(value.shape, axes, strict=True)
                ]
            )


def check_operators(model: ir.Model, flavour: str, n_layer: int) -> None:
    """Raise ExportError unless `model` has the attention of its flavour, and a portable one no other operators."""
    fused = sum(node.op_type == ATTENTION and node.domain == MICROSOFT for node in model.graph)
    if flavour == Flavour.NATIVE and fused != n_layer:
        raise ExportError(f"the graph has {fused} {ATTENTION} nodes for {n_layer} layers; expected one per layer")
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in model.graph if node.domain})
    if flavour == Flavour.PORTABLE and foreign:
        raise ExportError(f"the graph has {', '.join(foreign)}; a portable one has only standard operators")


def tensors_of(config: GPTConfig, flavour: str, dtype: str) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the contract's inputs and outputs for a network with a cache of `dtype`."""
    kv_shape = KVShape(
        n_layer=config.n_layer, n_head=config.n_head, head_dim=cache_head_dim(config, flavour), dtype=dtype
    )
    return graph_tensors(flavour, kv_shape, config.vocab_size, config.n_embd)


def cache_head_dim(config: GPTConfig, flavour: str) -> int:
    """Return the width of a head in the cache; the fused operator takes multiples of 8."""
    return padded_head_dim(config.head_dim) if flavour == Flavour.NATIVE else config.head_dim


def padded_head_dim(head_dim: int) -> int:
    """Return the next multiple of 8."""
    return -(-head_dim // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE


@torch.no_grad()
def halve(gpt: GPT, *, wide_head: bool = True) -> GPT:
    """Return a copy in float16, whose head is a WideHead unless that is not wanted.

    Raises ExportError, which names the weights, for values beyond float16.
    """
    state = {name: tensor.to(torch.float16) for name, tensor in gpt.state_dict().items()}
    bad = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ExportError(
            f"{', '.join(bad[:3])} has values beyond {torch.finfo(torch.float16).max:.0f}, the largest in float16; "
            "export in float32"
        )
    with torch.device("meta"):
        half = GPT(gpt.config)
    half.load_state_dict(state, assign=True)
    if wide_head:
        name = "wte" if gpt.config.tie_word_embeddings else "lm_head"
        setattr(half, name, WideHead(half.head.weight))  # has the interface that GPT uses
    return half.eval()


def pad_heads(gpt: GPT, head_dim: int) -> GPT:
    """Return a copy whose heads are padded with zeros to `head_dim`: the same function, with the same scale."""
    gpt = copy.deepcopy(gpt)
    n_embd, n_head, old = gpt.config.n_embd, gpt.config.n_head, gpt.config.head_dim
    for block in gpt.h:
        attn: Any = block.attn
        sizes = (n_embd, 3 * n_head * head_dim), (n_head * head_dim, n_embd)
        c_attn, c_proj = (Conv1D(*size).to(gpt.wte.weight.dtype) for size in sizes)
        pad = (0, head_dim - old)
        with torch.no_grad():
            weight = attn.c_attn.weight.view(n_embd, 3, n_head, old)
            c_attn.weight.copy_(nn.functional.pad(weight, pad).reshape(n_embd, -1))
            c_attn.bias.copy_(nn.functional.pad(attn.c_attn.bias.view(3, n_head, old), pad).reshape(-1))
            rows = attn.c_proj.weight.view(n_head, old, n_embd)
            c_proj.weight.copy_(nn.functional.pad(rows, (0, 0, *pad)).reshape(-1, n_embd))
            c_proj.bias.copy_(attn.c_proj.bias)
        attn.c_attn, attn.c_proj = c_attn, c_proj
    return gpt


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter on torchvision, and on axis names that it merges as intended.

    One export at a time: the level of a logger belongs to the whole process, and so does what the exporter patches.
    """
    logger = logging.getLogger("torch.onnx")
    with _one_export, quiet_warnings(".*axis name", UserWarning), quiet_warnings(".*treespec", FutureWarning):
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
