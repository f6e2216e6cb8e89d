"""Files of weights that a graph names, against the package onnx; other ways to write a name are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortgpt
from ortgpt import BundleError
from ortgpt.bundle import seal_bundle
from ortgpt.external_data import external_files


def external(name: str, location: str) -> TensorProto:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def model(*locations: str) -> onnx.ModelProto:
    """A graph with external weights as initializers and in attributes of nodes, of subgraphs, too."""
    tensors = [external(f"w{place}", location) for place, location in enumerate(locations)]
    inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensors[-1])], "inner", [], [])
    nodes = [
        helper.make_node("Constant", [], ["d"], value=tensors[0]),
        helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner),
    ]
    return helper.make_model(helper.make_graph(nodes, "outer", [], [], initializer=tensors))


def test_names_are_found_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for locations in (["a"], ["model.onnx.data", "weights.bin", "model.onnx.data"], ["../x", "/etc/passwd", "é"]):
        path.write_bytes(model(*locations).SerializeToString())
        assert external_files(path) == set(locations)
    path.write_bytes(helper.make_model(helper.make_graph([], "none", [], [])).SerializeToString())
    assert external_files(path) == set()
    path.write_bytes(b"")
    assert external_files(path) == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x6a\x0d\x0a\x08location\x12\x01a", b"\x6a\x0d\x12\x01a\x0a\x08location"),  # the value first
        (b"\x6a\x0d\x0a\x08location\x12\x01a", b"\x6a\x0e\x0a\x88\x00location\x12\x01a"),  # a length in two bytes
        (b"\x6a\x0d\x0a\x08location\x12\x01a", b"\x6a\x10\x0a\x08location\x12\x01a\x12\x01b"),  # two values
        (b"\x12\x01a", b"\x12\x01\xff"),  # no UTF-8
    ],
)
def test_a_name_in_another_form_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    data = model("a").SerializeToString()
    assert old in data
    (tmp_path / "model.onnx").write_bytes(data.replace(old, new))
    with pytest.raises(BundleError, match="names a file of weights"):
        external_files(tmp_path / "model.onnx")


def test_a_graph_that_reads_an_unlisted_file_is_refused(small_bundle: Path, tmp_path: Path) -> None:
    """Even if the manifest fits: a file beside the bundle's own would be read without a hash."""
    bundle = Path(shutil.copytree(small_bundle, tmp_path / "bundle"))
    shutil.copy(bundle / "model.onnx.data", bundle / "weights.bin")
    loaded = onnx.load(bundle / "model.onnx", load_external_data=False)
    entry = next(e for t in loaded.graph.initializer for e in t.external_data if e.key == "location")
    entry.value = "weights.bin"
    (bundle / "model.onnx").write_bytes(loaded.SerializeToString())
    seal_bundle(bundle)
    assert "weights.bin" not in json.loads((bundle / "ortgpt.json").read_text())["files"]
    with pytest.raises(BundleError, match=r"reads weights from weights\.bin, which the manifest does not list"):
        ortgpt.load(bundle)
