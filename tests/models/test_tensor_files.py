from __future__ import annotations

import datetime
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ortgpt_models import ModelError
from ortgpt_models.tensor_files import load_torch_file, open_tensor_file, state_tensors


class Hostile:
    """Pickled so that whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_never_run(tmp_path: Path, legacy: bool) -> None:
    path, trap = tmp_path / "pytorch_model.bin", tmp_path / "trap"
    for content in (Hostile(trap), {"wte.weight": torch.ones(2), "x": Hostile(trap)}):
        torch.save(content, path, _use_new_zipfile_serialization=not legacy)
        for numpy_scalars in (False, True):
            with pytest.raises(ModelError) as caught:
                load_torch_file(path, numpy_scalars=numpy_scalars)
            assert "asks for posix.mkdir" in str(caught.value)
            assert "code in a pickle is never run" in str(caught.value)
            assert "convert it to safetensors" in str(caught.value)
            assert "\n" not in str(caught.value)
            assert "weights_only" not in str(caught.value)  # no advice to be less strict
        with pytest.raises(ModelError, match="code in a pickle is never run"):
            open_tensor_file(path)
    path.write_bytes(pickle.dumps(Hostile(trap), protocol=2))
    with pytest.raises(ModelError, match=r"asks for posix\.mkdir"):
        open_tensor_file(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Hostile(trap)))
    assert trap.exists()  # the trap works


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        ({"a": datetime.date(2020, 1, 1)}, "datetime.date"),
        ({"a": np.ones(2)}, r"numpy\._?core\.multiarray\._reconstruct"),
    ],
)
def test_objects_beside_tensors_are_refused_by_name(tmp_path: Path, content: Any, name: str) -> None:
    path = tmp_path / "file.pt"
    torch.save(content, path)
    for numpy_scalars in (False, True):
        with pytest.raises(ModelError, match=f"asks for {name} beside"):
            load_torch_file(path, numpy_scalars=numpy_scalars)


@pytest.mark.parametrize("value", [np.float64(1.5), np.float32(-2), np.int64(7), np.int32(7), np.bool_(True)])
def test_numpy_numbers_are_taken_on_request(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": value}, path)
    assert load_torch_file(path, numpy_scalars=True) == {"a": value}
    with pytest.raises(ModelError, match=r"asks for numpy\._?core\.multiarray\.scalar"):
        load_torch_file(path)


def test_numpy_numbers_by_the_name_before_numpy_2(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": np.float64(1.5)}, path, _use_new_zipfile_serialization=False)
    old = path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in old
    path.write_bytes(old)
    assert load_torch_file(path, numpy_scalars=True) == {"a": 1.5}


@pytest.mark.parametrize("name", ["x.bin", "x.safetensors"])
def test_damaged_files_say_so_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = {}
    save_file({"a": torch.ones(500)}, tmp_path / "whole.safetensors")
    whole["x.safetensors"] = (tmp_path / "whole.safetensors").read_bytes()
    torch.save({"a": torch.ones(500)}, tmp_path / "whole.bin")
    whole["x.bin"] = (tmp_path / "whole.bin").read_bytes()
    for data in (b"", b"\x10", b"PK\x03\x04 and more", b"garbage" * 99, whole[name][:-300]):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=rf"{name} is not a") as caught:
            open_tensor_file(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    with pytest.raises(ModelError, match="only a Git LFS pointer"):
        open_tensor_file(path)
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot be read: No such file"):
        open_tensor_file(path)


def test_a_torchscript_archive_is_refused_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "file.pt"
    module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    module.save(str(path))
    recwarn.clear()
    with pytest.raises(ModelError, match="TorchScript archives"):
        load_torch_file(path)
    assert not recwarn.list


def test_tensors_that_repeat_what_is_stored_once_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(2**20, 2**20), "b": torch.ones(3)}, tmp_path / "x.bin")
    with pytest.raises(ModelError, match="stores fewer numbers than a has"):
        state_tensors(tmp_path / "x.bin", load_torch_file(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    "offsets",
    [
        {"a": [0, 16], "b": [8, 24]},  # overlap
        {"a": [0, 16], "b": [16, 40]},  # beyond the file
        {"a": [0, 16], "b": [24, 16]},  # backwards
        {"a": [0, 16], "b": [20, 36]},  # a gap
        {"a": [0, 16], "b": [16, 2**63]},
    ],
)
def test_offsets_that_are_not_those_of_the_tensors_are_refused(tmp_path: Path, offsets: dict[str, list[int]]) -> None:
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": place} for name, place in offsets.items()}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with pytest.raises(ModelError, match=r"x\.safetensors is not a"):
        open_tensor_file(path)
