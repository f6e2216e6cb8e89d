from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoTokenizer, GPT2LMHeadModel

from ortgpt_models import GPT, ModelError, load_gpt
from ortgpt_models.progress import Progress
from ortgpt_models.train import bits_per_byte, read_corpus, train
from ortgpt_models.training_config import TrainingConfig
from support import TEXT

CONFIG = TrainingConfig(
    n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=300, steps=12, batch_size=4, warmup_steps=3,
    evaluate_every=6, save_every=4,
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    return path


def loss_of(progress: Progress) -> float:
    return float(progress.activity.removeprefix("loss "))


def test_training_learns_and_writes_a_hugging_face_folder(text: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    notes: list[str] = []
    out = tmp_path / "out"
    config = TrainingConfig(**(vars(CONFIG) | {"steps": 200, "learning_rate": 1e-2}))
    bits = train([text], out, config=config, on_progress=seen.append, on_note=notes.append)
    assert [(progress.done, progress.total) for progress in seen] == [(step, 200) for step in range(1, 201)]
    losses = [loss_of(progress) for progress in seen]
    assert losses[0] == pytest.approx(math.log(300), rel=0.02)  # all tokens are equally likely at first
    assert losses[-1] < 0.7 * losses[0]
    lines = [re.fullmatch(r"step (\d+): held out (\d\.\d{4}) bits per byte", note) for note in notes]
    assert [int(line[1]) for line in lines if line] == list(range(6, 200, 6))
    measured = [float(line[2]) for line in lines if line]
    assert bits < 0.9 * measured[0]
    assert measured[-1] == pytest.approx(bits, rel=0.02)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "merges.txt", "model.safetensors", "training.json", "vocab.json",
    ]  # fmt: skip
    assert not (tmp_path / "out.training").exists()
    assert load_file(out / "model.safetensors")["transformer.wte.weight"].dtype == torch.float16
    record = json.loads((out / "training.json").read_text())
    assert record["held_out_bits_per_byte"] == round(bits, 5)
    ids = AutoTokenizer.from_pretrained(out)("It is a truth", return_tensors="pt").input_ids
    theirs = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (theirs(ids).logits - load_gpt(out)(ids)).abs().max() <= 1e-4


def test_an_interrupted_training_resumes_to_the_same_weights(text: Path, tmp_path: Path) -> None:
    whole: list[float] = []
    train([text], tmp_path / "whole", config=CONFIG, on_progress=lambda progress: whole.append(loss_of(progress)))

    def interrupt(progress: Progress) -> None:
        if progress.done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([text], tmp_path / "parts", config=CONFIG, on_progress=interrupt)
    assert not (tmp_path / "parts").exists()
    resumed: list[Progress] = []
    notes: list[str] = []
    train([text], tmp_path / "parts", config=CONFIG, on_progress=resumed.append, on_note=notes.append)
    assert notes == [f"resumes at step 8 of 12, as saved in {tmp_path / 'parts.training'}"]
    assert [progress.done for progress in resumed] == [9, 10, 11, 12]
    assert [loss_of(progress) for progress in resumed] == whole[8:]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


_WAITING = """if True:
    import sys
    from pathlib import Path
    from ortgpt_models.train import train
    from ortgpt_models.training_config import TrainingConfig
    def wait(progress):
        if progress.done == 2:
            print("waits", flush=True)
            sys.stdin.read()
    text, out, *numbers = sys.argv[1:]
    names = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "steps", "save_every", "warmup_steps")
    config = TrainingConfig(**dict(zip(names, map(int, numbers))))
    train([Path(text)], Path(out), config=config, on_progress=wait)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="folders have no locks there")
@pytest.mark.parametrize("save_every", [1, 9])  # a state is saved, or none
def test_a_second_training_of_a_folder_says_that_another_process_has_it(
    save_every: int, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    numbers = ["1", "2", "32", "16", "300", "4", str(save_every), "1"]
    flags = ["--n-layer", "--n-head", "--n-embd", "--n-positions", "--vocab-size", "--steps", "--save-every",
             "--warmup-steps"]  # fmt: skip
    options = [word for pair in zip(flags, numbers, strict=True) for word in pair]
    second = [sys.executable, "-m", "ortgpt", "train", str(text), "-o", str(out), *options]
    command = [sys.executable, "-c", _WAITING, str(text), str(out), *numbers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "waits\n"
        done = subprocess.run(second, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"Error: another process trains into {out}.training; wait for it, or choose another name for the "
            "checkpoint\n"
        )
        first.kill()
    assert not out.exists()
    subprocess.run(second, check=True, capture_output=True)  # a killed one holds nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_training_leaves_the_callers_random_state_as_it_was(text: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train([text], tmp_path / "out", config=TrainingConfig(**(vars(CONFIG) | {"steps": 2})))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_configuration_or_text_is_refused(text: Path, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 5:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train([text], out, config=CONFIG, on_progress=interrupt)
    with pytest.raises(ModelError, match="another configuration or other texts"):
        train([text], out, config=TrainingConfig(**(vars(CONFIG) | {"seed": 1})))
    path = tmp_path / "out.training" / "state.pt"
    state = torch.load(path, weights_only=True)
    values = state["values"]
    damages: list[Any] = [b"no", {}, [1], state | {"values": 1}]
    damages += [state | {"values": values | {name: {}}} for name in ("gpt", "optimizer", "step")]
    for damaged in damages:
        if isinstance(damaged, bytes):
            path.write_bytes(damaged)
        else:
            torch.save(damaged, path)
        with pytest.raises(ModelError, match="cannot be read"):
            train([text], out, config=CONFIG)


def test_held_out_loss_is_bits_per_byte_of_the_text(text: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a single man — must be in want of a wife. " * 5, encoding="utf-8")
    corpus = read_corpus([text], held_out, CONFIG)
    torch.manual_seed(0)
    gpt = GPT(CONFIG.gpt_config(end_of_text_id=corpus.end_of_text_id)).eval()
    ids = [corpus.end_of_text_id, *corpus.tokenizer.encode(held_out.read_text()).ids]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):
            inputs, targets = ids[start : start + 16], ids[start + 1 : start + 17]
            logits = gpt(torch.tensor([inputs[: len(targets)]]))[0]
            nats += F.cross_entropy(logits, torch.tensor(targets), reduction="sum").item()
    expected = nats / math.log(2) / len(held_out.read_bytes())
    assert bits_per_byte(gpt, corpus, 4) == pytest.approx(expected, rel=1e-5)


def test_without_a_held_out_file_the_end_of_the_text_is_never_trained_on(text: Path) -> None:
    corpus = read_corpus([text], None, CONFIG)
    whole = text.read_text()
    assert corpus.held_out_bytes == len(whole[int(len(whole) * 0.95) :].encode())
    trained = corpus.tokenizer.decode(corpus.train_ids.tolist(), skip_special_tokens=True)
    assert trained == whole[: int(len(whole) * 0.95)]


def test_the_held_out_end_may_span_several_texts(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the rightful property", encoding="utf-8")
    corpus = read_corpus([text, other], None, CONFIG)
    whole = text.read_text() + other.read_text()
    cut = int(len(whole) * 0.95)
    assert corpus.held_out_bytes == len(whole[cut:].encode())
    assert corpus.tokenizer.decode(corpus.train_ids.tolist(), skip_special_tokens=True) == whole[:cut]
    assert corpus.train_ids.tolist().count(corpus.end_of_text_id) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="fills the disk by a limit of POSIX")
def test_a_full_disk_is_an_os_error_and_leaves_no_state(text: Path, tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from ortgpt.cli.main import main; main(sys.argv[1:])"
    )
    shape = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--n-positions", "16", "--vocab-size", "300"]
    for every in ("1", "9"):  # a state is too large, or the checkpoint is
        args = ["train", str(text), "-o", str(tmp_path / "out"), *shape, "--steps", "2", "--save-every", every]
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "File too large" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != text]


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    config = TrainingConfig(steps=110, warmup_steps=10, learning_rate=1.0)
    assert [config.learning_rate_at(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert config.learning_rate_at(60) == pytest.approx(0.5)
    assert config.learning_rate_at(109) == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no text"),
        (b"\xff", "not UTF-8"),
        (b"\xff\xfea\0", "UTF-16"),
        (b"a <|endoftext|> b", "marks the end"),
        (b"short", "only"),
    ],
)
def test_unusable_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        train([path], tmp_path / "out", config=CONFIG)
    assert [item.name for item in tmp_path.iterdir()] == ["text.txt"]


def test_unusable_configurations_are_refused_by_name(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"vocab_size = 100.*steps = 0.*learning_rate = 0"):
        TrainingConfig(vocab_size=100, steps=0, learning_rate=0.0)
    with pytest.raises(ModelError, match="seed = 4294967296"):
        TrainingConfig(seed=2**32)
    with pytest.raises(ModelError, match="n_embd = 30 with n_head = 4"):
        TrainingConfig(n_embd=30)
    for name in ("n_layer", "n_head", "n_embd", "n_positions"):
        for value in (0, -1):
            with pytest.raises(ModelError, match=rf"unusable .*: {name} = {value} \(accepted: 1 or more\)$"):
                TrainingConfig(**{name: value})  # type: ignore[arg-type]  # all four are integers
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        train([text], tmp_path / "out", config=CONFIG)


def test_a_byte_order_mark_is_not_trained_on(text: Path, tmp_path: Path) -> None:
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + text.read_bytes())
    plain, other = (read_corpus([path], path, CONFIG) for path in (text, marked))
    assert (plain.sha256, plain.held_out_bytes) == (other.sha256, other.held_out_bytes)
    assert torch.equal(plain.train_ids, other.train_ids)
