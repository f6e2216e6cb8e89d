"""Quantise a portable graph by Optimum's dynamic 8-bit method, as other projects do. Needs the [optimum] extra.

A whole tensor of activations gets one scale when it is computed, so a row of a batch changes how the other rows are
rounded. `DynamicQuantizeLinear` and `MatMulInteger` are standard operators.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ortgpt.bundle.folder import Bundle
from ortgpt.contract import DType, File, Flavour
from ortgpt_exporter.graph.read import read_graph
from ortgpt_exporter.graph.save import save_graph
from ortgpt_exporter.quantization.rewrite_graph import Report, matrix_of, parameter_count, unweighted_products


def quantize_dynamic(source: Bundle, folder: Path, method: str, *, external_data: bool) -> Report:
    """Write the quantised graph of a portable bundle into `folder`; `method` is one of request.DYNAMIC.

    Raises ModuleNotFoundError without the extra.
    """
    from optimum.onnxruntime import AutoQuantizationConfig, ORTQuantizer

    make = getattr(AutoQuantizationConfig, method.removeprefix("dynamic-").replace("-", "_"))
    config = make(is_static=False, per_channel=True)
    quantizer = ORTQuantizer.from_pretrained(source.path, file_name=File.MODEL)
    quantizer.quantize(save_dir=folder, quantization_config=config, file_suffix=None)
    before, after = read_graph(source.path), ir.load(folder / File.MODEL)
    report = Report(parameters=parameter_count(before))
    tensors = [value.const_value for value in after.graph.initializers.values() if value.const_value is not None]
    in_bytes = (ir.DataType.INT8, ir.DataType.UINT8)
    report.quantized[DType.INT8] = sum(tensor.dtype in in_bytes and len(tensor.shape) == 2 for tensor in tensors)
    report.left_out = unweighted_products(after)
    for node in after.graph:
        name = matrix_of(node)
        if name is not None and after.graph.initializers[name].dtype == ir.DataType.FLOAT:
            report.left_out[name] = "Optimum left it in float32"
    ir.external_data.load_to_model(after)
    for path in folder.iterdir():  # Optimum writes its own configuration, too
        path.unlink()
    save_graph(after, folder, Flavour.PORTABLE, external_data=external_data)
    return report
