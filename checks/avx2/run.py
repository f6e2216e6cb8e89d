"""Run products.py on an emulated CPU with AVX2 and without VNNI: `make check-avx2`, run.py WORK_FOLDER [EMULATOR...].

On such a CPU, ONNX Runtime's kernels for unsigned × signed bytes saturate silently unless an option forbids it. Without
an emulator, products.py runs on this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

import ortgpt
from ortgpt_exporter import Quantization, export_bundle, quantize_bundle
from ortgpt_exporter.graph.initializers import constant
from ortgpt_exporter.quantization.blocks import Blocks
from ortgpt_exporter.quantization.integer_nodes import nbits_matmul

WIDTH, OUT = 256, 64
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of"
RECIPES = [
    Quantization(dtype="int8"),
    Quantization(dtype="int8", method="w8a8"),
    Quantization(dtype="int4"),
    Quantization(dtype="int4", block_size=32),
]


def graph_of(make_nodes: Callable[[ir.Graph, ir.Value], list[ir.Node]], dtype: ir.DataType) -> ir.Model:
    """Return a graph that computes y from x, of this dtype, with the nodes that a function makes."""
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([None, WIDTH]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1}, name="g")
    nodes = make_nodes(graph, x)
    nodes[-1].outputs[0].name = "y"
    out = ir.DataType.INT32 if dtype == ir.DataType.UINT8 else ir.DataType.FLOAT
    nodes[-1].outputs[0].type = ir.TensorType(out)
    graph.extend(nodes)
    graph.outputs.append(nodes[-1].outputs[0])
    return ir.Model(graph, ir_version=10)


def write_products(work: Path) -> None:
    """Write graphs that multiply the largest integers, and the results that they must give."""

    def bytes_product(graph: ir.Graph, x: ir.Value) -> list[ir.Node]:
        weights = constant(graph, "w", np.full((WIDTH, OUT), 127, np.int8))
        return [ir.node("MatMulInteger", [x, weights, constant(graph, "z", np.array(0, np.uint8))])]

    def blocks_product(graph: ir.Graph, x: ir.Value, *, bits: int, block_size: int, integer: int) -> list[ir.Node]:
        integers = np.full((OUT, WIDTH // block_size, block_size), integer, np.uint8)
        blocks = Blocks.pack(integers, np.ones(integers.shape[:2], np.float32), bits=bits)
        return nbits_matmul(graph, ir.node("MatMul", [x]), "w", blocks)

    expected = []
    ir.save(graph_of(bytes_product, ir.DataType.UINT8), work / "bytes.onnx")
    for rows in (1, 4, 9):
        expected.append(("bytes.onnx", rows, "uint8", 255, 255 * 127 * WIDTH, 0.0))
    for bits, integer in ((8, 255), (8, 0), (4, 15), (4, 0)):
        for block_size in (16, 32, 64, 128):
            name = f"int{bits}-{integer}-blocks-of-{block_size}.onnx"
            make_nodes = partial(blocks_product, bits=bits, block_size=block_size, integer=integer)
            ir.save(graph_of(make_nodes, ir.DataType.FLOAT), work / name)
            sign = -1 if integer == 0 else 1
            for rows in (1, 2, 9):
                y = 127 * abs(integer - 2 ** (bits - 1)) * WIDTH
                expected.append((name, rows, "float32", 127 * sign, y, 1e-6))
    keys = ("graph", "rows", "dtype", "x", "y", "tolerance")
    products = [dict(zip(keys, values, strict=True)) | {"width": WIDTH} for values in expected]
    (work / "products.json").write_text(json.dumps(products))


def write_bundles(work: Path) -> None:
    """Write the bundled model in each recipe, and its logits of a text on this machine."""
    for flavour in ("native", "portable"):
        source = export_bundle("austen", work / flavour, flavour=flavour).path
        for recipe in RECIPES:
            if flavour == "native" or recipe.method == "w8a8" or (recipe.dtype == "int4" and recipe.block_size is None):
                name = f"{flavour}-{recipe.dtype}-{recipe.method or 'blocks'}{recipe.block_size or ''}"
                quantize_bundle(source, work / name, recipe)
    for bundle in sorted(path.parent for path in work.glob("*/ortgpt.json")):
        with ortgpt.load(bundle) as generator:
            ids = generator.tokenizer.encode(TEXT)
            cache = generator.engine.new_cache(1, len(ids))
            np.save(work / f"{bundle.name}.npy", generator.engine.prefill(cache, [ids], np.arange(len(ids))[None])[0])
    (work / "ids.json").write_text(json.dumps(ids))


def main() -> None:
    work, emulator = Path(sys.argv[1]), sys.argv[2:]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_products(work)
    write_bundles(work)
    script = str(Path(__file__).parent / "products.py")
    sys.exit(subprocess.run([*emulator, sys.executable, script, str(work)], check=False).returncode)


if __name__ == "__main__":
    main()
