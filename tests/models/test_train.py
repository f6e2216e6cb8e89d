from __future__ import annotations

import dataclasses
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
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from ortgpt_models import ModelError, load_gpt
from ortgpt_models.corpus import Corpus, encode_corpus, read_texts, train_tokenizer
from ortgpt_models.progress import Progress
from ortgpt_models.starting_point import StartingPoint, from_scratch, trainable
from ortgpt_models.train import bits_per_byte, train
from ortgpt_models.training_config import TrainingConfig
from support import TEXT, random_model

CONFIG = TrainingConfig(
    n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=300, steps=12, batch_size=4, warmup_steps=3,
    evaluate_every=6, save_every=4,
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    return path


def scratch(texts: list[Path], held_out: Path | None = None) -> tuple[StartingPoint, Corpus]:
    """Return the network from scratch that CONFIG describes, and the texts encoded for it."""
    read = read_texts(texts, held_out)
    start = from_scratch(read, CONFIG)
    return start, encode_corpus(read, start.encode, start.end_of_text_id, 16)


def loss_of(progress: Progress) -> float:
    return float(progress.activity.removeprefix("loss "))


def test_training_learns_and_writes_a_hugging_face_folder(text: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    notes: list[str] = []
    out = tmp_path / "out"
    config = dataclasses.replace(CONFIG, steps=200, learning_rate=1e-2)
    result = train([text], out, config=config, on_progress=seen.append, on_note=notes.append)
    bits = result.bits_per_byte
    assert result.bits_per_byte_before is None
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


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2, "batch_size": 2, "window": 8}, {"norm": "post", "dropout": 0.3}],
    ids=str,
)
def test_an_interrupted_training_resumes_to_the_same_weights(
    settings: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(CONFIG, **settings)
    whole: list[float] = []
    train([text], tmp_path / "whole", config=config, on_progress=lambda progress: whole.append(loss_of(progress)))

    def interrupt(progress: Progress) -> None:
        if progress.done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([text], tmp_path / "parts", config=config, on_progress=interrupt)
    assert not (tmp_path / "parts").exists()
    resumed: list[Progress] = []
    notes: list[str] = []
    train([text], tmp_path / "parts", config=config, on_progress=resumed.append, on_note=notes.append)
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
    train([text], tmp_path / "out", config=dataclasses.replace(CONFIG, steps=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_another_configuration_or_text_is_refused(text: Path, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done == 5:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train([text], out, config=CONFIG, on_progress=interrupt)
    with pytest.raises(ModelError, match="another configuration, checkpoint or data"):
        train([text], out, config=dataclasses.replace(CONFIG, seed=1))
    path = tmp_path / "out.training" / "state.pt"
    state = torch.load(path, weights_only=True)
    values = state["values"]
    damages: list[Any] = [b"no", {}, [1], state | {"values": 1}]
    damages += [state | {"values": values | {name: {}}} for name in ("weights", "optimizer", "step")]
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
    torch.manual_seed(0)
    start, corpus = scratch([text], held_out)
    gpt = start.network.eval()
    ids = [start.end_of_text_id, *start.encode(held_out.read_text(encoding="utf-8"))]
    nats = 0.0
    with torch.no_grad():
        for first in range(0, len(ids) - 1, 16):
            inputs, targets = ids[first : first + 16], ids[first + 1 : first + 17]
            logits = gpt(torch.tensor([inputs[: len(targets)]]))[0]
            nats += F.cross_entropy(logits, torch.tensor(targets), reduction="sum").item()
    expected = nats / math.log(2) / len(held_out.read_bytes())
    assert bits_per_byte(gpt, corpus, window=16, batch_size=4) == pytest.approx(expected, rel=1e-5)


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


def test_a_folder_that_exists_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        train([text], tmp_path / "out", config=CONFIG)


def weights_after(text: Path, out: Path, start: StartingPoint | None = None, **settings: Any) -> dict[str, Tensor]:
    """Train without dropout, and return the weights in float32, which the folder has in float16."""
    written: dict[str, Tensor] = {}
    if start is None:
        read = read_texts([text], None)
        torch.manual_seed(0)
        start = from_scratch(read, CONFIG)
    network = start.network

    def write(folder: Path) -> None:
        written.update({name: tensor.clone() for name, tensor in network.state_dict().items()})

    config = TrainingConfig(**({"dropout": 0.0, "steps": 4, "warmup_steps": 2} | settings))
    exact = dataclasses.replace(start, write=write, dtype=torch.float32, learning_rate=1e-3)
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    train([text], out, config=config, start=exact)
    return written


def test_accumulated_gradients_are_those_of_the_larger_batch(text: Path, tmp_path: Path) -> None:
    whole = weights_after(text, tmp_path / "whole", batch_size=6)
    parts = weights_after(text, tmp_path / "parts", batch_size=2, gradient_accumulation_steps=3)
    fewer = weights_after(text, tmp_path / "fewer", batch_size=2)
    differences = [max(float((whole[name] - other[name]).abs().max()) for name in whole) for other in (parts, fewer)]
    assert differences[0] <= 2e-6
    assert differences[1] > 1e-4


def test_a_step_is_that_of_plain_pytorch_on_the_network_of_transformers(text: Path, tmp_path: Path) -> None:
    model = random_model(3, vocab_size=300, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
                         eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model.save_pretrained(tmp_path / "base")
    read = read_texts([text], None)
    tokenizer = train_tokenizer(read.documents, 300)
    start = StartingPoint(
        trainable(load_gpt(tmp_path / "base")),
        n_positions=16,
        encode=lambda text: tokenizer.encode(text).ids,
        end_of_text_id=0,
        write=lambda folder: None,
        sha256="base",
    )
    steps = {"steps": 2, "warmup_steps": 2, "batch_size": 4, "learning_rate": 1e-2, "clip_norm": 0.5, "seed": 5}
    ours = weights_after(text, tmp_path / "out", start, **steps)

    ids = torch.tensor([each for document in read.documents for each in [*tokenizer.encode(document).ids, 0]])
    decayed = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    model.train()
    for step, rate in enumerate((0.5e-2, 1e-2)):
        torch.manual_seed(5 * 1_000_003 + step)
        rows = torch.stack([ids[first : first + 17] for first in torch.randint(len(ids) - 16, (4, 1))[:, 0].tolist()])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]).logits.reshape(-1, 300), rows[:, 1:].reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    theirs = model.transformer.state_dict()
    assert ours.keys() <= theirs.keys()
    before = load_gpt(tmp_path / "base").state_dict()
    assert all(float((ours[name] - before[name]).abs().max()) > 1e-4 for name in ours)
    for name in ours:
        difference = (ours[name] - theirs[name]).abs()
        if name.endswith("c_attn.bias"):  # attention does not depend on the key's: Adam scales up what is rounding
            difference[32:64] = 0.0
        assert difference.max() <= 1e-5, name


def test_a_post_norm_network_is_written_as_a_gpt1_that_transformers_opens(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train([text], out, config=dataclasses.replace(CONFIG, norm="post"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["architectures"]) == ("openai-gpt", ["OpenAIGPTLMHeadModel"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == config["eos_token_id"] == 0
    assert tokenizer.decode(tokenizer("A Truth, ñandú").input_ids) == "A Truth, ñandú"
    ids = tokenizer("It is a truth", return_tensors="pt").input_ids
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (theirs(ids).logits - load_gpt(out)(ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("norm", "residual_scaling", "is_scaled"),
    [("pre", None, True), ("pre", False, False), ("post", None, False), ("post", True, True)],
)
def test_residual_projections_are_scaled_with_pre_norm_or_as_asked(
    norm: str, residual_scaling: bool | None, is_scaled: bool, text: Path
) -> None:
    config = dataclasses.replace(CONFIG, norm=norm, n_layer=8, n_embd=128, residual_scaling=residual_scaling)
    assert config.resolved().residual_scaling == is_scaled
    gpt: Any = from_scratch(read_texts([text], None), config).network
    std = 0.02 / 4 if is_scaled else 0.02  # √(2 · 8)
    for block in gpt.h:
        for weight, expected in ((block.mlp.c_proj.weight, std), (block.mlp.c_fc.weight, 0.02)):
            assert weight.std().item() == pytest.approx(expected, rel=0.03)


def test_a_loss_that_is_not_finite_ends_the_training(text: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(ModelError, match=r"^loss became (nan|inf) at step \d+; use a learning rate below 1e\+30$"):
        train([text], tmp_path / "out", config=config)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_what_the_device_does_not_have_is_refused_before_the_training(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    with pytest.raises(ModelError, match=r"^device = cuda: PyTorch .* finds no GPU"):
        train([text], tmp_path / "out", config=dataclasses.replace(CONFIG, device="cuda"))
    with pytest.raises(ModelError, match=r"^bfloat16: this cpu has no instructions for it"):
        train([text], tmp_path / "out", config=dataclasses.replace(CONFIG, bfloat16=True))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"^compile: .* needs a C\+\+ compiler, and no-such-compiler is not installed"):
        train([text], tmp_path / "out", config=dataclasses.replace(CONFIG, compile=True))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    train([text], tmp_path / "out", config=dataclasses.replace(CONFIG, steps=1))
    record = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert record["recipe"]["device"] == "cpu"  # what auto chose


def test_a_compiled_training_takes_the_same_steps(text: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, n_layer=1, steps=2, dropout=0.0, warmup_steps=1)
    plain: list[Progress] = []
    compiled: list[Progress] = []
    train([text], tmp_path / "plain", config=config, on_progress=plain.append)
    config = dataclasses.replace(config, compile=True)
    train([text], tmp_path / "compiled", config=config, on_progress=compiled.append)
    assert list(map(loss_of, compiled)) == pytest.approx(list(map(loss_of, plain)), abs=2e-3)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "compiled"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=1e-2, atol=2e-3)
