"""Run products.py under an emulated CPU that has AVX2 and no VNNI: `make test-avx2`, run.py WORK_FOLDER [EMULATOR...].

There ONNX Runtime's kernels for unsigned × signed bytes saturate, silently, unless they are told not to. Without an
emulator it runs on this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def graph_of(make: Any, kind: ir.DataType) -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(kind), shape=ir.Shape([None, WIDTH]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1}, name="g")
    nodes = make(graph, x)
    nodes[-1].outputs[0].name = "y"
    out = ir.DataType.INT32 if kind == ir.DataType.UINT8 else ir.DataType.FLOAT
    nodes[-1].outputs[0].type = ir.TensorType(out)
    graph.extend(nodes)
    graph.outputs.append(nodes[-1].outputs[0])
    return ir.Model(graph, ir_version=10)


def write_products(work: Path) -> None:
    """Write graphs of the largest integers, and what they must give."""

    def bytes_product(graph: ir.Graph, x: ir.Value) -> list[ir.Node]:
        weights = constant(graph, "w", np.full((WIDTH, OUT), 127, np.int8))
        return [ir.node("MatMulInteger", [x, weights, constant(graph, "z", np.array(0, np.uint8))])]

    def blocks_product(bits: int, block_size: int, integer: int) -> Any:
        integers = np.full((OUT, WIDTH // block_size, block_size), integer, np.uint8)
        blocks = Blocks(bits=bits, integers=integers, scales=np.ones(integers.shape[:2], np.float32))

        def make(graph: ir.Graph, x: ir.Value) -> list[ir.Node]:
            return nbits_matmul(graph, ir.node("MatMul", [x]), "w", blocks)

        return make

    expected = []
    ir.save(graph_of(bytes_product, ir.DataType.UINT8), work / "bytes.onnx")
    for rows in (1, 4, 9):
        expected.append(("bytes.onnx", rows, "uint8", 255, 255 * 127 * WIDTH, 0.0))
    for bits, integer in ((8, 255), (8, 0), (4, 15), (4, 0)):
        for block_size in (16, 32, 64, 128):
            name = f"int{bits}-{integer}-blocks-of-{block_size}.onnx"
            ir.save(graph_of(blocks_product(bits, block_size, integer), ir.DataType.FLOAT), work / name)
            sign = -1 if integer == 0 else 1
            for rows in (1, 2, 9):
                y = 127 * abs(integer - 2 ** (bits - 1)) * WIDTH
                expected.append((name, rows, "float32", 127 * sign, y, 1e-6))
    keys = ("graph", "rows", "dtype", "x", "y", "tolerance")
    listed = [dict(zip(keys, values, strict=True)) | {"width": WIDTH} for values in expected]
    (work / "products.json").write_text(json.dumps(listed))


def write_bundles(work: Path) -> None:
    """Write the bundled model in each recipe, and the logits of a text on this machine."""
    for flavour in ("native", "portable"):
        source = export_bundle("austen", work / flavour, flavour=flavour).path
        for asked in RECIPES:
            if flavour == "native" or asked.method == "w8a8" or (asked.dtype == "int4" and asked.block_size is None):
                method, size = asked.method or "blocks", asked.block_size or ""
                quantize_bundle(source, work / f"{flavour}-{asked.dtype}-{method}{size}", asked)
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
