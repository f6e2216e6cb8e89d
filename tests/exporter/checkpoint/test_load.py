from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model

from exporter.checkpoint.hub_server import COMMIT, Hub, folder_repo, serve_hub, use_hub
from ortgpt import OrtGptError
from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint.load import Checkpoint, CheckpointSource, find_folder, load_checkpoint
from ortgpt_models import GPT, load_gpt
from ortgpt_models.progress import Progress
from support import SMALL_VOCAB, random_model, write_checkpoint, write_small_tokenizer

SHAPE = {"vocab_size": SMALL_VOCAB, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}


@pytest.fixture
def folder(small_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_checkpoint, tmp_path / "my-model"))


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    with serve_hub() as served:
        served.repos["me/my-model"] = folder_repo(folder)
        use_hub(served, tmp_path / "home", monkeypatch)
        yield served


def load(name: str | Path, **settings: Any) -> Checkpoint:
    return load_checkpoint(CheckpointSource(name, **settings))


def sha256(*files: Path) -> str:
    """Return the file's sha256, or that of those of several joined."""
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return digests[0] if len(files) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def logits(gpt: GPT) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = gpt(torch.arange(40)[None] * 7 % SMALL_VOCAB)
    return output


def as_bin(folder: Path) -> None:
    """Make the folder one that has its weights in pytorch_model.bin."""
    model = random_model(0, **SHAPE, bos_token_id=0, eos_token_id=0)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def write_nanogpt(path: Path, vocab_size: int = SMALL_VOCAB) -> None:
    """Write the small network as nanoGPT does: linear layers turned around, compiled-prefix keys."""
    model = random_model(0, **SHAPE | {"vocab_size": vocab_size})
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    state = {
        f"_orig_mod.{name}": tensor.T.contiguous() if name.endswith(turned) else tensor
        for name, tensor in model.state_dict().items()
    }
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 48, "block_size": 64, "bias": True, "vocab_size": vocab_size}
    torch.save({"model": state, "model_args": sizes | {"dropout": 0.0}, "iter_num": 7}, path)


def write_adapter(out: Path, card: str = "# LoRA") -> Path:
    torch.manual_seed(1)
    adapted = get_peft_model(random_model(0, **SHAPE), LoraConfig(r=2, fan_in_fan_out=True, target_modules=["c_attn"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    adapted.save_pretrained(str(out))
    (out / "README.md").write_text(card)
    return out


def test_a_folder_gives_network_tokenizer_and_provenance(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# Model\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 0}')
    loaded = load(folder)
    assert loaded.gpt.config.n_layer == 2
    assert loaded.tokenizer_files.tokenizer.vocab_size == 300
    assert loaded.tokenizer_files.texts["vocab.json"] == (folder / "vocab.json").read_text()
    assert loaded.generation_config == {"temperature": 0.7, "eos_token_id": 0}
    assert (loaded.source.id, loaded.source.licence, loaded.source.revision) == ("my-model", "mit", None)
    assert loaded.source.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_without_a_generation_config_end_of_text_comes_from_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    loaded = load(folder)
    assert loaded.generation_config == {"bos_token_id": 0, "eos_token_id": 0}
    assert loaded.source.licence is None


def test_a_path_that_exists_wins_over_the_bundled_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_folder("austen").parts[-2:] == ("checkpoints", "austen")
    assert (load("austen").source.id, load("austen").gpt.config.vocab_size) == ("austen", 4096)
    shutil.copytree(folder, tmp_path / "here" / "austen")
    monkeypatch.chdir(tmp_path / "here")
    for path in ("austen", "./austen", Path("austen"), tmp_path / "here" / "austen"):
        assert find_folder(path).resolve() == tmp_path / "here" / "austen"
        assert load(path).gpt.config.vocab_size == SMALL_VOCAB


def test_names_of_nothing_are_refused() -> None:
    accepted = (
        "accepted: a Hugging Face folder, a nanoGPT ckpt.pt, a hub id like openai-community/gpt2, or one of: austen"
    )
    for name in ("none", "gpt2", "", "./me/my-model", "out/ckpt.pt", "x" * 5000, "a\0b", Path("me/my-model")):
        with pytest.raises(ExportError) as caught:
            load(name)
        assert str(caught.value).endswith(f" does not exist ({accepted})")
    with pytest.raises(ExportError, match="none does not exist"):
        find_folder("none")


def test_without_its_checkpoint_austen_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)  # as in a wheel
    with pytest.raises(ExportError) as caught:
        load("austen")
    assert str(caught.value) == (
        "the checkpoint austen is not installed: take models/ortgpt_models/checkpoints/austen from a clone or the "
        "source distribution of this project and name that folder; `ortgpt generate austen` needs no export"
    )


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: 'apache-2.0'\n---\n", "apache-2.0"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\nlicense:\ntags: x\n---\n", None),
        ("no front matter\nlicense: mit\n", None),
        ("---\nlicense: mit\n---\n\udcff", "mit"),
    ],
)
def test_the_licence_of_a_model_card(folder: Path, card: str, licence: str | None) -> None:
    (folder / "README.md").write_bytes(card.encode("utf-8", "surrogateescape"))
    assert load(folder).source.licence == licence


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "generation_config.json",
            '{"eos_token_id": [0, 1.5]}',
            r"generation_config\.json: eos_token_id = \[0, 1\.5\]",
        ),
        ("generation_config.json", '{"bad_words_ids": [[]]}', r"generation_config\.json: bad_words = \[\[\]\]"),
        ("generation_config.json", '{"temperature": "hot"}', r"generation_config\.json: temperature = 'hot'"),
    ],
)
def test_generation_defaults_that_would_fail_later_are_refused(
    folder: Path, name: str, content: str, reason: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ExportError, match=reason):
        load(folder)


def test_a_model_smaller_than_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "small", vocab_size=290)
    with pytest.raises(ExportError, match="tokenizer has 300 ids, the model only 290 rows"):
        load(folder)


def test_a_model_larger_than_its_tokenizer_has_rows_without_a_token(tmp_path: Path) -> None:
    loaded = load(write_checkpoint(tmp_path / "padded", vocab_size=304))
    assert (loaded.gpt.config.vocab_size, loaded.tokenizer_files.tokenizer.vocab_size) == (304, 300)


def test_keys_that_only_transformers_uses_are_no_fault(folder: Path) -> None:
    values = {"max_length": 50, "num_beams": 4, "forced_eos_token_id": 0, "suppress_tokens": [], "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert load(folder).generation_config == values | {"eos_token_id": []}  # it names none


def test_missing_tokenizer_files_are_named(folder: Path) -> None:
    (folder / "merges.txt").unlink()
    with pytest.raises(ExportError, match=r"no merges\.txt in .*any as tokenizer\.json"):
        load(folder)


def test_another_tokenizer_is_taken_where_one_is_named(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    write_small_tokenizer(other, vocab_size=280)
    assert load(folder, tokenizer=other).tokenizer_files.tokenizer.vocab_size == 280
    (folder / "merges.txt").unlink()
    assert load(folder, tokenizer=str(other)).tokenizer_files.tokenizer.vocab_size == 280
    with pytest.raises(ExportError, match="tokenizer has 4096 ids, the model only 300 rows"):
        load(folder, tokenizer="austen")
    accepted = (
        r"\(accepted: a folder with the files of a tokenizer, a tokenizer\.json of any name, a nanoGPT meta\.pkl, "
    )
    for name, reason in (
        (other / "none", f"does not exist {accepted}"),
        (other / "merges.txt", f"is a file {accepted}"),
        (other / "vocab.json", r"vocab\.json is a file, and not a whole tokenizer \(accepted: a tokenizer\.json"),
    ):
        with pytest.raises(ExportError, match=reason):
            load(folder, tokenizer=name)


def test_several_files_of_weights_have_one_sha256(folder: Path) -> None:
    whole = load(folder)
    random_model(0, **SHAPE, bos_token_id=0, eos_token_id=0).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    loaded = load(folder)
    assert torch.equal(logits(loaded.gpt), logits(whole.gpt))
    assert loaded.source.sha256 == sha256(*shards)
    assert loaded.notes == ()


def test_weights_out_of_a_pickle_are_told(folder: Path) -> None:
    whole = load(folder)
    as_bin(folder)
    loaded = load(folder)
    assert torch.equal(logits(loaded.gpt), logits(whole.gpt))
    assert loaded.notes == ("the folder has no safetensors; pytorch_model.bin was read with weights_only=True",)
    assert loaded.source.sha256 == sha256(folder / "pytorch_model.bin")


def test_a_nanogpt_file_takes_a_tokenizer_and_its_end_of_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "ckpt.pt"
    path.parent.mkdir()
    write_nanogpt(path, vocab_size=304)
    loaded = load(str(path), tokenizer=folder)
    expected = random_model(0, **SHAPE | {"vocab_size": 304}, activation_function="gelu")
    with torch.no_grad():
        ids = torch.arange(40)[None] * 7 % SMALL_VOCAB
        assert (loaded.gpt(ids) - expected(ids).logits).abs().max() < 1e-4
    assert (loaded.gpt.config.bos_token_id, loaded.gpt.config.eos_token_id) == (0, 0)
    assert loaded.generation_config == {"bos_token_id": 0, "eos_token_id": 0}
    assert (loaded.source.id, loaded.source.sha256) == ("out/ckpt.pt", sha256(path))
    assert (loaded.source.revision, loaded.source.licence) == (None, None)
    assert (loaded.gpt.config.vocab_size, loaded.tokenizer_files.tokenizer.vocab_size) == (304, 300)
    read = "ckpt.pt was read with weights_only=True, and as it does not state its activation, with "
    masked = (
        "the model has 304 rows and the tokenizer 300 ids; the rows without a token, 4 from id 300 on, are never picked"
    )
    assert loaded.notes == (f"{read}gelu", masked)
    tanh = load(path, tokenizer=folder, activation="gelu_new")
    assert tanh.gpt.config.activation_function == "gelu_new"
    assert tanh.notes == (f"{read}gelu_new", masked)
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["<|end|>"] = vocab.pop("<|endoftext|>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    loaded = load(path, tokenizer=folder)
    assert loaded.generation_config == {"bos_token_id": None, "eos_token_id": None}
    ends = load(path, tokenizer=folder, bos_token_id=3, eos_token_id=vocab["<|end|>"])
    assert ends.generation_config == {"bos_token_id": 3, "eos_token_id": 0}
    assert (ends.gpt.config.bos_token_id, ends.gpt.config.eos_token_id) == (3, 0)


def test_what_a_file_cannot_be_is_said(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"  # any name will do
    write_nanogpt(path)
    with pytest.raises(ExportError, match=r"carries no tokenizer; name the one it was trained with \(--tokenizer\)"):
        load(path)
    with pytest.raises(ExportError, match="tokenizer has 4096 ids, the model only 300 rows"):
        load(path, tokenizer="austen")
    path.write_text("text")
    with pytest.raises(ExportError, match="model"):
        load(path, tokenizer=folder)
    as_bin(folder)
    for name in ("pytorch_model.bin", "config.json"):
        with pytest.raises(ExportError, match=r"is one file of a checkpoint; name its folder, .*my-model"):
            load(folder / name)
    with pytest.raises(ExportError, match=r"activation = 'gelu' is for a nanoGPT file; .* leave it out"):
        load(folder, activation="gelu")


def test_an_adapter_is_merged_and_recorded(folder: Path, tmp_path: Path) -> None:
    plain = load(folder)
    adapter = write_adapter(tmp_path / "my-adapter", "---\nlicense: apache-2.0\n---\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    loaded = load(folder, adapter=adapter)
    assert (logits(loaded.gpt) - logits(plain.gpt)).abs().max() > 0.01
    assert loaded.source.id == "my-model + my-adapter"
    assert loaded.source.sha256 == sha256(folder / "model.safetensors", adapter / "adapter_model.safetensors")
    assert loaded.source.licence == "mit + apache-2.0"
    (adapter / "README.md").write_text("---\nlicense: mit\n---\n")
    assert load(folder, adapter=str(adapter)).source.licence == "mit"
    with pytest.raises(ExportError, match=r"none does not exist \(accepted: the folder of a PEFT adapter, or a hub id"):
        load(folder, adapter="none")


def test_a_hub_id_gives_network_tokenizer_and_commit(hub: Hub, folder: Path) -> None:
    seen: list[Progress] = []
    loaded = load_checkpoint(CheckpointSource("me/my-model"), on_progress=seen.append)
    assert torch.equal(logits(loaded.gpt), logits(load_gpt(folder)))
    assert (loaded.source.id, loaded.source.revision, loaded.source.licence) == ("me/my-model", COMMIT, "mit")
    assert loaded.source.sha256 == sha256(folder / "model.safetensors")
    assert loaded.tokenizer_files.texts["merges.txt"] == (folder / "merges.txt").read_text()
    assert loaded.notes == ()
    assert seen[-1].activity.startswith("downloading me/my-model, ")
    assert seen[-1].done == seen[-1].total == sum(path.stat().st_size for path in folder.iterdir())
    hub.repos["me/my-model"].revisions["v1"] = "e" * 40
    assert load("me/my-model", revision="v1").source.revision == "e" * 40
    with pytest.raises(ExportError, match="has no revision 'v2'"):
        load("me/my-model", revision="v2")


def test_tokenizer_and_adapter_by_hub_id(hub: Hub, folder: Path, tmp_path: Path) -> None:
    hub.repos["me/lora"] = folder_repo(write_adapter(tmp_path / "lora"))
    hub.repos["me/lora"].revisions["main"] = "b" * 40
    path = tmp_path / "ckpt.pt"
    write_nanogpt(path)
    loaded = load(path, tokenizer="me/my-model", adapter="me/lora", activation="gelu_new")
    assert loaded.source.id == f"{tmp_path.name}/ckpt.pt + me/lora@{'b' * 40}"
    assert loaded.source.revision is None
    expected = load(folder, adapter=tmp_path / "lora")
    assert torch.equal(logits(loaded.gpt), logits(expected.gpt))
    of_tokenizer = {"config.json", "vocab.json", "merges.txt"}
    wanted = of_tokenizer | {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {name.split("/")[1] for name in hub.downloads()} == wanted


def test_a_repository_with_nothing_but_a_pickle_is_told(hub: Hub, folder: Path, tmp_path: Path) -> None:
    as_bin(folder)
    hub.repos["me/old"] = folder_repo(folder)
    told = "the repository has no safetensors; pytorch_model.bin was read with weights_only=True"
    assert load("me/old").notes == (told,)
    hub.status = 502
    silent, again = load("me/old").notes
    assert again == told
    assert silent == f"{hub.url} did not answer; me/old was taken from the cache, commit {COMMIT}"


def test_a_path_that_exists_wins_over_a_hub_id(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder, folder.parent / "me" / "my-model")
    monkeypatch.chdir(folder.parent)
    loaded = load("me/my-model")
    assert (loaded.source.id, loaded.source.revision) == ("my-model", None)
    assert hub.requests == []


def test_a_revision_of_what_is_here_is_refused(folder: Path) -> None:
    for name in ("austen", folder):
        with pytest.raises(
            ExportError, match=r"revision = 'main' is for a hub id, and .* is on this machine; leave it out"
        ):
            load(name, revision="main")


def test_offline_a_checkpoint_comes_from_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = load("me/my-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert load("me/my-model").source == online.source
    with pytest.raises(ExportError, match="me/other is not a folder here, and there is no me/other in the cache"):
        load("me/other")
    assert hub.requests == []


NOT_FILES: list[Callable[[Path], Any]] = [
    os.mkfifo,
    os.mkdir,
    lambda path: path.symlink_to(path.parent / "nowhere"),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
]


@pytest.mark.parametrize("make", NOT_FILES)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "vocab.json", "added_tokens.json",
     "tokenizer_config.json", "README.md"],
)  # fmt: skip
def test_what_is_not_a_file_is_neither_read_nor_passed_over(
    name: str, make: Callable[[Path], Any], folder: Path
) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ExportError, match=f"{re.escape(name)} is not a file"):
        load(folder)


def test_a_checkpoint_that_is_neither_folder_nor_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExportError, match="pipe is neither a folder nor a file"):
        load(tmp_path / "pipe", tokenizer="austen")


def test_a_damaged_network_or_adapter_is_an_export_error(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "my-adapter")
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ExportError, match=r"adapter_config\.json is not valid JSON"):
        load(folder, adapter=adapter)
    (folder / "config.json").write_text('{"n_layer": 0}')
    with pytest.raises(OrtGptError, match="unsupported configuration: n_layer = 0"):
        load(folder)


def test_without_peft_an_adapter_is_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        load("me/my-model", adapter="me/lora")
    assert caught.value.name == "peft"
    assert hub.requests == []


def test_a_source_is_made_by_name() -> None:
    source = CheckpointSource("me/gpt", revision="v1")
    assert (source.name, source.revision, source.tokenizer, source.adapter) == ("me/gpt", "v1", None, None)
    with pytest.raises(TypeError):
        CheckpointSource("me/gpt", "v1")  # type: ignore[call-arg]  # only the name is positional
