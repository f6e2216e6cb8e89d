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
from ortgpt.bundle.external_data import external_files
from support import reseal


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


ENTRY = b"\x6a\x0d\x0a\x08location\x12\x01a"


def written_by(path: Path) -> set[str]:
    """Return what the package onnx reads."""
    loaded = onnx.load(path, load_external_data=False)
    tensors = [*loaded.graph.initializer, loaded.graph.node[0].attribute[0].t]
    tensors += [each.t for branch in loaded.graph.node[1].attribute for each in branch.g.node[0].attribute]
    return {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (b"\x6a\x0d\x12\x01b\x0a\x08location", {"a", "b"}),  # the value first
        (b"\x6a\x0e\x0a\x88\x00location\x12\x01b", {"a", "b"}),  # a length in two bytes
        (b"\xea\x00\x0d\x0a\x08location\x12\x01b", {"a", "b"}),  # the field's number in two bytes
        (b"\x6a\x11\x0a\x08location\x12\x01b\x1a\x02xy", {"a", "b"}),  # a field more
        (b"\x6a\x10\x08\x05\x0a\x08location\x12\x01b\x18", None),  # a number more, without its end
        (b"\x6a\x10\x0a\x08location\x12\x01a\x12\x01b", None),  # two values: the last one counts
        # What looks like an entry is the value of another, whose own stands behind it.
        (b"\x6a\x14\x12\x02\x6a\x0d\x0a\x08location\x12\x01a\x12\x01b", None),
        (b"\xea\x80\x80\x80\x10\x0d\x0a\x08location\x12\x01b", None),  # a number of more than 29 bits
        (b"\x6b\x0a\x08location\x12\x01b\x6c", None),  # a group
        (b"\x6a\x0d\x0a\x08location\x12\x01\xff", None),  # no UTF-8
        (b"\x6a\x0c\x0a\x0alocation\x12\x01", {"a"}),  # a key that runs into what follows
    ],
)
def test_a_name_is_read_as_onnx_reads_it_or_refused(tmp_path: Path, entry: bytes, names: set[str] | None) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(replace_entry(model("a").SerializeToString(), entry))
    if names is not None:
        assert external_files(path) == written_by(path) == names
    else:
        with pytest.raises(BundleError, match="is not an ONNX file"):
            external_files(path)


def replace_entry(data: bytes, entry: bytes) -> bytes:
    """Put an entry into the last initializer of model(), with the lengths of all that it lies in as they then are."""
    loaded = onnx.ModelProto.FromString(data)
    tensor = loaded.graph.initializer.pop()
    kept = loaded.graph.SerializeToString()
    raw = tensor.SerializeToString()
    assert ENTRY in raw
    raw = raw.replace(ENTRY, entry)
    loaded.ClearField("graph")
    graph = kept + b"\x2a" + varint(len(raw)) + raw
    return bytes(loaded.SerializeToString() + b"\x3a" + varint(len(graph)) + graph)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def test_no_name_is_missed_in_damaged_files(tmp_path: Path) -> None:
    """What onnx still reads from a file with a changed byte is found, or the file is refused."""
    path, whole = tmp_path / "model.onnx", model("a", "bc").SerializeToString()
    read = 0
    for place in range(len(whole)):
        for change in (1, 2, 8, 16, 64, 128):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            try:
                want = written_by(path)
            except Exception:  # noqa: BLE001  # no ONNX file for onnx, or another graph
                continue
            try:
                assert external_files(path) >= want, (place, change)
                read += 1
            except BundleError:
                continue
    assert read > len(whole)


def test_a_graph_that_reads_an_unlisted_file_is_refused(small_bundle: Path, tmp_path: Path) -> None:
    """Even if the manifest fits: a file beside the bundle's own would be read without a hash."""
    bundle = Path(shutil.copytree(small_bundle, tmp_path / "bundle"))
    shutil.copy(bundle / "model.onnx.data", bundle / "weights.bin")
    loaded = onnx.load(bundle / "model.onnx", load_external_data=False)
    entry = next(e for t in loaded.graph.initializer for e in t.external_data if e.key == "location")
    entry.value = "weights.bin"
    (bundle / "model.onnx").write_bytes(loaded.SerializeToString())
    reseal(bundle)
    assert "weights.bin" not in json.loads((bundle / "ortgpt.json").read_text())["files"]
    with pytest.raises(BundleError, match=r"reads weights from weights\.bin, which the manifest does not list"):
        ortgpt.load(bundle)
