"""What the commands say if a package is missing, and how their flags follow the settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from ortgpt.ort.package import install_hint
from ortgpt_exporter.cli import export, one_line_errors, quantize, train
from ortgpt_exporter.quantization.request import Quantization
from ortgpt_models.training_config import TrainingConfig


@pytest.mark.parametrize(
    ("package", "extra"),
    [("torch.nn", "export"), ("httpx2", "export"), ("huggingface_hub", "export"), ("peft", "lora"),
     ("optimum", "optimum")],
)  # fmt: skip
@pytest.mark.parametrize("has_onnxruntime", [True, False])
def test_a_missing_package_is_named_with_the_extras_that_bring_it(
    package: str, extra: str, has_onnxruntime: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "onnxruntime" and not has_onnxruntime else find_spec(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(click.ClickException) as caught, one_line_errors():
        raise ModuleNotFoundError("no", name=package)
    name = package.partition(".")[0]
    hint = install_hint(extra) if has_onnxruntime else install_hint("cpu", extra)
    assert caught.value.message.startswith(f"this command needs {name}, which is not installed; {hint}")
    assert ("cpu" in hint.split("whl/cpu")[-1]) == (not has_onnxruntime)


def test_a_package_of_no_extra_is_an_error_of_the_program() -> None:
    with pytest.raises(ModuleNotFoundError), one_line_errors():
        raise ModuleNotFoundError("no", name="another")


def test_quantisation_imports_where_onnxruntime_is_not_installed() -> None:
    code = """
import sys
sys.modules["onnxruntime"] = None
import ortgpt_exporter.quantize
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [export, quantize])
def test_each_setting_of_a_quantisation_has_a_flag(command: click.Command) -> None:
    options = {option.name: option for option in command.params}
    for setting in dataclasses.fields(Quantization):
        option = options[setting.name]
        assert isinstance(option, click.Option)
        assert option.opts == ["--eval" if setting.name == "eval_text" else f"--{setting.name.replace('_', '-')}"]
        if setting.name != "dtype":
            assert option.help == setting.metadata["help"]
    assert isinstance(options["head_dtype"].type, click.Choice)
    assert options["block_size"].type is click.INT
    assert options["max_kl"].type is click.FLOAT
    assert options["calibration"].type.convert("a", None, None) == Path("a")


def test_each_setting_of_a_training_has_a_flag_with_its_default() -> None:
    options = {option.name: option for option in train.params}
    for setting in dataclasses.fields(TrainingConfig):
        option = options[setting.name]
        assert isinstance(option, click.Option)
        assert option.help == setting.metadata["help"]
        if option.is_flag:
            assert setting.default is False
        else:
            assert option.default == setting.default
