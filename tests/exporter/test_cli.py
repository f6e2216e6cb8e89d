"""What the commands say if a package is missing, and how their flags follow the settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from ortgpt.cli.main import main
from ortgpt.ort.package import install_hint
from ortgpt_exporter.adapter_settings import AdapterSettings
from ortgpt_exporter.cli import export, one_line_errors, quantize, train
from ortgpt_exporter.quantization.request import Quantization
from ortgpt_models.training_config import TrainingConfig
from support import TEXT, write_checkpoint


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
    for setting in (*dataclasses.fields(TrainingConfig), *dataclasses.fields(AdapterSettings)):
        option = options[setting.name]
        assert isinstance(option, click.Option)
        assert option.help == setting.metadata["help"]
        assert option.default == setting.default
        assert option.is_flag == (setting.metadata.get("kind", type(setting.default)) is bool)
        if option.is_flag:
            assert bool(option.secondary_opts) == (setting.default is None)  # --no-..., where neither is the default


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--revision", "x", "--lora-rank", "2"], "--revision, --lora-rank would have no effect (accepted with "
         "--from)"),
        (["--from", "x", "--lora-alpha", "2"], "lora_alpha would have no effect without lora_rank"),
        (["--from", "no/such.pt"], "no/such.pt does not exist (accepted: a Hugging Face folder, a nanoGPT ckpt.pt, "
         "a hub id like openai-community/gpt2, or one of: austen)"),
        (["--from", "austen", "--preset", "gpt2", "--n-head", "8"], "preset = gpt2, n_head = 8 would have no effect: a "
         "checkpoint to start from has a shape of its own; leave it out, or train from scratch"),
        (["--from", "austen", "--window", "257"], "window = 257 (accepted: at most the context, n_positions = 256)"),
        (["--dropout", "-1"], "unusable training configuration: dropout = -1.0 (accepted: 0 or more)"),
    ],
)  # fmt: skip
def test_train_refuses_what_does_not_fit_in_one_line(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["train", str(text), "-o", str(tmp_path / "out"), *flags])
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {message}"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_train_refuses_what_it_can_before_it_loads_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    for words, message in (
        ([str(text), "-o", str(tmp_path)], "already exists; nothing was written"),
        ([str(tmp_path / "no.txt"), "-o", str(tmp_path / "out")], "No such file"),
        ([str(text), "-o", str(tmp_path / "out"), "--device", "cuda"], "finds no GPU"),
        ([str(text), "-o", str(tmp_path / "out"), "--held-out", str(tmp_path / "no.txt")], "No such file"),
    ):
        with pytest.raises(SystemExit):
            main(["train", *words, "--from", "no/such.pt"])
        assert message in capsys.readouterr().err


def test_train_writes_the_loss_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, text = write_checkpoint(tmp_path / "base"), tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    recipe = ["--steps", "2", "--batch-size", "1", "--warmup-steps", "1", "--window", "8", "--evaluate-every", "1"]
    capsys.readouterr()  # what `transformers` wrote
    main(["train", str(text), "-o", str(tmp_path / "out"), "--from", str(checkpoint), *recipe], standalone_mode=False)
    output = capsys.readouterr()
    record = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    (start, before), (middle, _), (end, after) = record["held_out_losses"]
    assert (start, middle, end, after) == (0, 1, 2, record["held_out_bits_per_byte"])
    first, _, last = output.err.splitlines()
    assert output.out == ""
    assert first == f"step 0: held out {before:.4f} bits per byte"
    assert last == f"{tmp_path / 'out'}  held out {after:.4f} bits per byte, before the training {before:.4f}"


def test_export_takes_the_special_ids(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", vocab_size=302, bos_token_id=50256, eos_token_id=50256)
    (checkpoint / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>"}')
    command = [sys.executable, "-m", "ortgpt", "export", str(checkpoint), "-o"]
    plain = subprocess.run([*command, tmp_path / "plain"], capture_output=True, text=True, check=True)
    notes = [line for line in plain.stderr.splitlines() if line.startswith("Note: ")]
    begins = (
        "Note: special tokens that have no id",
        "Note: the model has 302 rows",
        "Note: eos_token_id = 50256; bos_",
    )
    assert [note.startswith(begin) for note, begin in zip(notes, begins, strict=True)] == [True] * 3
    assert "1 from id 301 on, are never picked" in notes[1]
    ids = ["--eos-token-id", "0", "--eos-token-id", "7", "--bos-token-id", "3"]
    given = subprocess.run([*command, tmp_path / "given", *ids], capture_output=True, text=True, check=True)
    assert "eos_token_id" not in given.stderr
    values = json.loads((tmp_path / "given" / "generation_config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == (3, [0, 7])
    config = json.loads((tmp_path / "given" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 0)
    wrong = subprocess.run([*command, tmp_path / "wrong", "--eos-token-id", "301"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr == "Error: eos_token_id = 301: not in the tokenizer (accepted: 0 to 300)\n"
