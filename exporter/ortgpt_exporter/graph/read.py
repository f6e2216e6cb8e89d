"""Read the graph of a bundle whose files may be links. Knows no node."""

from __future__ import annotations

import os
from pathlib import Path

import onnx_ir as ir

from ortgpt.contract import File


def read_graph(folder: Path) -> ir.Model:
    """Return the graph of a bundle that open_bundle() accepted. Raises DecodeError if it is not an ONNX graph.

    onnx-ir refuses a file of weights that is a link out of the graph's folder, as in the hub's cache, so each tensor is
    given the file that the link leads to.
    """
    model = ir.load(folder / File.MODEL)
    for value in model.graph.initializers.values():
        stored = value.const_value
        if isinstance(stored, ir.ExternalTensor) and os.path.islink(folder / stored.location):
            real = Path(os.path.realpath(folder / stored.location))
            value.const_value = ir.ExternalTensor(
                real.name,
                stored.offset,
                stored.length,
                stored.dtype,
                shape=stored.shape,
                name=stored.name or "",
                doc_string=stored.doc_string,
                metadata_props=stored.metadata_props,
                base_dir=real.parent,
            )
    return model
