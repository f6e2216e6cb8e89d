"""Trainings that start from a checkpoint: what they write opens in `transformers` and `peft`, and exports."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import ortgpt
from classifiers import write_classifier
from models.test_nanogpt import make as make_nanogpt
from models.test_nanogpt import write as write_nanogpt
from ortgpt.errors import PromptError
from ortgpt_exporter import CheckpointSource, ExportError, export_bundle
from ortgpt_exporter.adapter_settings import AdapterSettings
from ortgpt_exporter.checkpoint.load import load_checkpoint
from ortgpt_exporter.starting_point import open_starting_point
from ortgpt_models import ModelError, load_gpt
from ortgpt_models.corpus import encode_corpus, read_texts
from ortgpt_models.progress import Progress
from ortgpt_models.train import TrainingResult, train
from ortgpt_models.training_config import TrainingConfig
from support import TEXT, write_checkpoint

pytestmark = pytest.mark.filterwarnings(r"ignore:::(peft|transformers)\..*")  # they warn of each other's outdated names

CONFIG = TrainingConfig(window=16, steps=6, batch_size=4, warmup_steps=2, learning_rate=1e-2, save_every=2)
LORA = AdapterSettings(lora_rank=3)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return path


def trained(
    checkpoint: str | Path | CheckpointSource,
    text: Path,
    out: Path,
    adapter: AdapterSettings | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    **settings: Any,
) -> TrainingResult:
    """Train from a checkpoint as the command line does."""
    source = checkpoint if isinstance(checkpoint, CheckpointSource) else CheckpointSource(checkpoint)
    config = dataclasses.replace(CONFIG, **settings)
    start = open_starting_point(source, config, adapter)
    return train([text], out, config=config, start=start, on_progress=on_progress)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(ids)
    found: torch.Tensor = getattr(output, "logits", output)
    return found


def test_a_checkpoint_is_trained_further_and_keeps_its_tokenizer_and_defaults(text: Path, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", vocab_size=301, resid_pdrop=0.0)
    (base / "special_tokens_map.json").write_text('{"pad_token": "<|pad|>"}', encoding="utf-8")
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 7], "temperature": 0.5}', encoding="utf-8")
    (base / "README.md").write_text("---\nlicense: cc0-1.0\n---\n", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    out = tmp_path / "out"
    result = trained(base, text, out)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert result.bits_per_byte_before is not None
    assert result.bits_per_byte < result.bits_per_byte_before - 0.3

    record = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert record["from"]["id"] == "base"
    assert record["held_out_losses"][0] == [0, round(result.bits_per_byte_before, 5)]
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == [0, 7]
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["dtype"], config["resid_pdrop"], config["attn_pdrop"]) == ("float32", 0.0, 0.1)

    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    own, other = (AutoTokenizer.from_pretrained(folder) for folder in (base, out))
    line = "It is a truth, ñandú<|pad|> 👩 <|endoftext|>"
    assert own(line).input_ids == other(line).input_ids
    assert (other.pad_token_id, other.eos_token_id) == (300, 0)
    ids = torch.tensor([own("It is a truth universally").input_ids])
    assert (logits(theirs, ids) - logits(load_gpt(out), ids)).abs().max() <= 1e-4
    assert (logits(theirs, ids) - logits(load_gpt(base), ids)).abs().max() > 0.1

    again = load_checkpoint(CheckpointSource(out))
    first = load_checkpoint(CheckpointSource(base))
    assert again.tokenizer_files.vocab == first.tokenizer_files.vocab
    assert again.tokenizer_files.kind == first.tokenizer_files.kind
    assert again.generation_config == first.generation_config
    assert again.source.licence == "cc0-1.0"
    export_bundle(out, tmp_path / "bundle")
    with ortgpt.load(tmp_path / "bundle") as generator:
        assert generator.tokenizer.encode("It is a truth universally") == ids[0].tolist()


def test_the_loss_before_and_after_is_that_of_transformers_on_what_is_written(text: Path, tmp_path: Path) -> None:
    base, held_out = write_checkpoint(tmp_path / "base"), tmp_path / "held_out.txt"
    held_out.write_text("a single man of good fortune — in want of a wife", encoding="utf-8")
    start = open_starting_point(CheckpointSource(base), CONFIG)
    result = train([text], tmp_path / "out", config=CONFIG, held_out=held_out, start=start)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = [0, *tokenizer(held_out.read_text(encoding="utf-8")).input_ids]
    measured = []
    for folder in (base, tmp_path / "out"):
        model, nats = AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0
        for first in range(0, len(ids) - 1, 16):
            targets = torch.tensor(ids[first + 1 : first + 17])
            inputs = torch.tensor([ids[first : first + len(targets)]])
            nats += F.cross_entropy(logits(model, inputs)[0], targets, reduction="sum").item()
        measured.append(nats / torch.log(torch.tensor(2.0)).item() / len(held_out.read_bytes()))
    assert [result.bits_per_byte_before, result.bits_per_byte] == pytest.approx(measured, rel=1e-5)


def test_a_gpt1_without_end_of_text_is_trained_without_one(text: Path, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family="openai-gpt")
    start = open_starting_point(CheckpointSource(base), CONFIG)
    assert start.end_of_text_id is None
    train([text, text], tmp_path / "out", config=CONFIG, start=start)
    record = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    read = read_texts([text, text], None)
    assert record["train_tokens"] == sum(len(start.encode(document)) for document in read.documents)
    ids = torch.tensor([[5, 9, 200, 31]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (logits(theirs, ids) - logits(load_gpt(tmp_path / "out"), ids)).abs().max() <= 1e-4
    line = "A truth, Ñandú"
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")(line).input_ids
        == AutoTokenizer.from_pretrained(base)(line).input_ids
    )
    assert export_bundle(tmp_path / "out", tmp_path / "bundle").manifest.architecture.norm == "post"


def test_a_post_norm_network_from_scratch_exports(text: Path, tmp_path: Path) -> None:
    config = TrainingConfig(norm="post", n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=300, steps=2)
    train([text], tmp_path / "out", config=config)
    bundle = export_bundle(tmp_path / "out", tmp_path / "bundle")
    assert (bundle.manifest.architecture.norm, bundle.manifest.tokenizer.kind) == ("post", "byte-level-bpe")
    with ortgpt.load(bundle.path) as generator:
        ids = generator.tokenizer.encode("It is a Truth")
        assert ids == AutoTokenizer.from_pretrained(tmp_path / "out")("It is a Truth").input_ids


def test_characters_of_a_nanogpt_file_are_written_as_a_tokenizer(text: Path, tmp_path: Path) -> None:
    letters = sorted(set(TEXT))
    (tmp_path / "nano").mkdir()
    write_nanogpt(
        tmp_path / "nano" / "ckpt.pt", make_nanogpt(vocab_size=len(letters)).state_dict(), vocab_size=len(letters)
    )
    stoi = {letter: place for place, letter in enumerate(letters)}
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": stoi}
    (tmp_path / "nano" / "meta.pkl").write_bytes(pickle.dumps(meta))
    checkpoint = tmp_path / "nano" / "ckpt.pt"
    n_positions = load_checkpoint(CheckpointSource(checkpoint)).gpt.config.n_positions
    trained(checkpoint, text, tmp_path / "out", window=min(16, n_positions))
    expected = [stoi[letter] for letter in "It is"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("It is").input_ids == expected
    assert load_checkpoint(CheckpointSource(tmp_path / "out")).tokenizer_files.tokenizer.encode("It is") == expected
    text.write_text("Ωmega", encoding="utf-8")
    with pytest.raises(PromptError, match="the tokenizer has no token for 'Ω', at character 0"):
        trained(checkpoint, text, tmp_path / "other", window=4)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("adapter", [None, AdapterSettings(lora_rank=2, lora_dropout=0.3)], ids=["weights", "lora"])
def test_an_interrupted_training_resumes_to_the_same_weights(
    adapter: AdapterSettings | None, text: Path, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base")
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "batch_size": 2}
    whole = trained(base, text, tmp_path / "whole", adapter, **settings)

    def interrupt(progress: Progress) -> None:
        if progress.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(base, text, tmp_path / "parts", adapter, on_progress=interrupt, **settings)
    seen: list[int] = []
    parts = trained(
        base, text, tmp_path / "parts", adapter, on_progress=lambda progress: seen.append(progress.done), **settings
    )
    assert seen == [5, 6]
    assert parts == whole
    name = "model.safetensors" if adapter is None else "adapter_model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_a_state_of_another_checkpoint_or_adapter_is_refused(text: Path, tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / str(seed), seed=seed) for seed in (1, 2))

    def interrupt(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(first, text, tmp_path / "out", LORA, on_progress=interrupt)
    others: list[tuple[Path, AdapterSettings | None]] = [
        (second, LORA), (first, AdapterSettings(lora_rank=3, lora_alpha=3)), (first, None)
    ]  # fmt: skip
    for base, adapter in others:
        with pytest.raises(ModelError, match="an unfinished training with another configuration, checkpoint or data"):
            trained(base, text, tmp_path / "out", adapter)


def test_a_lora_is_that_of_peft_and_its_merged_export_gives_its_logits(text: Path, tmp_path: Path) -> None:
    base, out = write_checkpoint(tmp_path / "base"), tmp_path / "out"
    settings: dict[str, Any] = {"dropout": 0.0, "steps": 3, "seed": 4, "weight_decay": 0.0}
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    result = trained(base, text, out, LORA, **settings)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "training.json",
    ]  # fmt: skip
    assert result.bits_per_byte < (result.bits_per_byte_before or 0.0)
    record = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert record["adapter"] == {"lora_rank": 3, "lora_alpha": 6, "lora_dropout": 0.0}
    tensors = load_file(out / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == 2 * 3 * (48 + 3 * 48)  # layers × rank × (in + out)

    # The same steps with peft on the network of transformers.
    tokenizer, read = AutoTokenizer.from_pretrained(base), read_texts([text], None)
    ids = encode_corpus(read, lambda text: tokenizer(text).input_ids, 0, 16).train_ids
    torch.manual_seed(4)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["c_attn"], fan_in_fan_out=True)
    model: Any = AutoModelForCausalLM.from_pretrained(base, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    adapted: Any = peft.get_peft_model(model, config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        torch.manual_seed(4 * 1_000_003 + step)
        rows = torch.stack([ids[first : first + 17] for first in torch.randint(len(ids) - 16, (4, 1))[:, 0].tolist()])
        optimizer.zero_grad()
        F.cross_entropy(adapted(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = (0.5e-2, 1e-2, 1e-2)[step]
        optimizer.step()
    theirs = peft.get_peft_model_state_dict(adapted)
    assert tensors.keys() == theirs.keys()
    assert max(float((tensors[name] - theirs[name]).abs().max()) for name in tensors) <= 1e-5
    assert max(float(tensor.abs().max()) for name, tensor in tensors.items() if "lora_B" in name) > 1e-3

    # What peft opens, what a merge gives, and the bundle.
    opened = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(out)).eval()
    prompt = torch.tensor([tokenizer("It is a truth").input_ids])
    expected = logits(opened, prompt)
    merged = load_checkpoint(CheckpointSource(base, adapter=out)).gpt
    assert (logits(merged, prompt) - expected).abs().max() <= 1e-4
    assert (logits(load_gpt(base), prompt) - expected).abs().max() > 1e-2
    export_bundle(CheckpointSource(base, adapter=out), tmp_path / "bundle")


def test_only_the_adapter_is_trained(text: Path, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family="openai-gpt")
    start = open_starting_point(CheckpointSource(base), CONFIG, LORA)
    before = {name: weight.detach().clone() for name, weight in start.network.named_parameters()}
    trainable = {name for name, weight in start.network.named_parameters() if weight.requires_grad}
    assert sum(before[name].numel() for name in trainable) == 2 * 3 * (48 + 3 * 48)
    train([text], tmp_path / "out", config=CONFIG, start=start)
    changed = {name for name, weight in start.network.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == trainable


def test_what_cannot_be_started_from_is_refused_in_one_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base")
    write_classifier(tmp_path / "classifier")
    with pytest.raises(ExportError, match=r"is a classifier \(GPT2ForSequenceClassification\); a training on text"):
        trained(tmp_path / "classifier", text, tmp_path / "out")
    with pytest.raises(ExportError, match="tokenizer = none: a text cannot be encoded"):
        trained(CheckpointSource(base, tokenizer="none"), text, tmp_path / "out")
    with pytest.raises(ExportError, match="missing does not exist"):
        trained(tmp_path / "missing", text, tmp_path / "out")
    with pytest.raises(ModelError, match="n_layer = 3 would have no effect"):
        trained(tmp_path / "missing", text, tmp_path / "out", n_layer=3)  # before anything is loaded
    with pytest.raises(ModelError, match=r"window = 65 \(accepted: at most the context, n_positions = 64\)"):
        trained(base, text, tmp_path / "out", window=65)
    with pytest.raises(ModelError, match=r"resid_pdrop = 1\.0 \(accepted"):
        trained(base, text, tmp_path / "out", dropout=1.0)
    text.write_text("short", encoding="utf-8")
    with pytest.raises(ModelError, match="are too few"):
        trained(base, text, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match="peft"):
        trained(tmp_path / "missing", text, tmp_path / "out", LORA)  # before anything is loaded
    assert not (tmp_path / "out").exists()


def test_tokens_that_a_tokenizer_does_not_know_are_noted(text: Path, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    vocab = json.loads((base / "vocab.json").read_text(encoding="utf-8"))
    words = {"[UNK]": 0, **{f"word{number}": number for number in range(1, len(vocab))}}
    (base / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    for name in ("vocab.json", "merges.txt"):
        (base / name).unlink()
    notes: list[str] = []
    start = open_starting_point(CheckpointSource(base), CONFIG, on_note=notes.append)
    assert start.encode("word1 other word2 thing") == [1, 0, 2, 0]
    assert notes[-1] == "the tokenizer does not know 2 of the 4 tokens of a text"


def test_settings_of_an_adapter_are_checked() -> None:
    assert AdapterSettings(lora_rank=4).alpha == 8
    assert AdapterSettings(lora_rank=4, lora_alpha=1).alpha == 1
    with pytest.raises(
        ModelError, match=r"lora_rank = 0 \(accepted: 1 or more\); lora_dropout = 1.0 \(accepted: 0 to 0.99\)"
    ):
        AdapterSettings(lora_rank=0, lora_dropout=1.0)
    with pytest.raises(ModelError, match="lora_alpha and lora_dropout would have no effect without lora_rank"):
        AdapterSettings(lora_alpha=3, lora_dropout=0.1)
