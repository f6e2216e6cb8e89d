"""Optimum's dynamic 8-bit quantisation of a portable graph, for those who have it elsewhere. Needs the [optimum] extra.

Activations are rounded as they come, with one scale for a whole tensor: a row of a batch changes how the others are
rounded. `DynamicQuantizeLinear` and `MatMulInteger` are standard operators.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ortgpt.bundle import Bundle
from ortgpt.contract import DType, File
from ortgpt_exporter.bundle_folder import save_graph
from ortgpt_exporter.quantize import Report, matrix_of, parameter_count, unweighted_products


def quantize_dynamic(source: Bundle, folder: Path, method: str, *, external_data: bool) -> Report:
    """Write the quantised graph of a portable bundle into `folder`; `method` is one of recipe.DYNAMIC.

    Raises ModuleNotFoundError without the extra.
    """
    from optimum.onnxruntime import AutoQuantizationConfig, ORTQuantizer

    make = getattr(AutoQuantizationConfig, method.removeprefix("dynamic-").replace("-", "_"))
    config = make(is_static=False, per_channel=True)
    quantizer = ORTQuantizer.from_pretrained(source.path, file_name=File.MODEL)
    quantizer.quantize(save_dir=folder, quantization_config=config, file_suffix=None)
    before, after = ir.load(source.path / File.MODEL), ir.load(folder / File.MODEL)
    report = Report(parameters=parameter_count(before))
    matrices = {name for node in before.graph if (name := matrix_of(node)) is not None}
    left = matrices & after.graph.initializers.keys()
    report.quantized[DType.INT8] = len(matrices - left)
    report.kept = dict.fromkeys(sorted(left), "Optimum left it in float32") | unweighted_products(after)
    ir.external_data.load_to_model(after)
    for path in folder.iterdir():  # Optimum writes its own configuration beside it
        path.unlink()
    save_graph(after, folder, external_data=external_data)
    return report
