"""Merged adapters against the adapted model of `peft`, and files that a merge must refuse."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, EvaConfig, LoraConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, GPT2LMHeadModel, GPT2Model

from ortgpt_exporter import ExportError
from ortgpt_exporter.checkpoint.lora import ADAPTER_TYPES, adapter_file, merge_adapter
from ortgpt_models import GPT, GPTClassifier, ModelError, load_gpt, load_network, save_gpt
from support import random_model

pytestmark = pytest.mark.filterwarnings(r"ignore:::(peft|transformers)\..*")  # they warn of odd settings

SHAPE = {
    "vocab_size": 60,
    "n_positions": 32,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
PREFIX = "base_model.model.transformer."
C_ATTN = f"{PREFIX}h.0.attn.c_attn"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    random_model(11, **SHAPE).save_pretrained(folder)
    return folder


def adapt(model: Any, kind: str = "LORA", **settings: Any) -> Any:
    """Put an adapter on `model` in which every tensor that training could change has changed."""
    torch.manual_seed(12)
    defaults = {"r": 4, "lora_alpha": 6} if kind == "LORA" else {}
    adapted: Any = get_peft_model(model, PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**(defaults | settings)))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and kind == "LORA":
                parameter.normal_(0.0, 0.3)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return adapted.eval()


def make_adapter(out: Path, kind: str = "LORA", **settings: Any) -> Any:
    """Write an adapter of the base model to `out` and return the adapted model of `peft`."""
    adapted = adapt(random_model(11, **SHAPE), kind, **settings)
    adapted.save_pretrained(out)
    return adapted


def merged(base: Path, folder: Path) -> GPT:
    gpt = load_gpt(base)
    merge_adapter(gpt, folder)
    return gpt


@torch.no_grad()
def assert_same(gpt: GPT, adapted: Any) -> None:
    ids = torch.arange(32)[None] * 13 % 60
    expected = adapted(ids).logits
    assert (gpt(ids) - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max())


@torch.no_grad()
def assert_changed(gpt: GPT, base: Path) -> None:
    ids = torch.arange(32)[None] * 13 % 60
    assert (gpt(ids) - load_gpt(base)(ids)).abs().max() > 0.02


def rewrite(folder: Path, change: Any) -> dict[str, Tensor]:
    path = folder / "adapter_model.safetensors"
    tensors: dict[str, Tensor] = change(load_file(path))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return tensors


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def refusal(base: Path, folder: Path) -> str:
    """Return the error of a merge, which must be one line and leave the network as it was."""
    gpt = load_gpt(base)
    before = copy.deepcopy(gpt.state_dict())
    with pytest.raises(ExportError) as caught:
        merge_adapter(gpt, folder)
    assert all(torch.equal(value, before[name]) for name, value in gpt.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


ALL_LINEAR = ["c_attn", "c_proj", "c_fc"]
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {},
    "fan_in_fan_out": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "all-linear": {"target_modules": "all-linear"},
    "pattern": {"target_modules": r".*\.h\.1\.(attn|mlp)\.c_proj"},
    "some layers": {"target_modules": ALL_LINEAR, "layers_to_transform": [1], "layers_pattern": "h"},
    "excluded": {"target_modules": ALL_LINEAR, "exclude_modules": ["h.0.attn.c_proj"]},
    "excluded by pattern": {"target_modules": ALL_LINEAR, "exclude_modules": r".*\.mlp\..*"},
    "rslora": {"target_modules": ALL_LINEAR, "use_rslora": True},
    "dora": {"target_modules": ALL_LINEAR, "use_dora": True},
    "rank_pattern": {"target_modules": ALL_LINEAR, "rank_pattern": {"mlp.c_proj": 2, r"h\.\d+\.attn.c_proj": 7}},
    "alpha_pattern": {
        "target_modules": ALL_LINEAR, "use_rslora": True, "rank_pattern": {"c_fc": 3},
        "alpha_pattern": {"transformer.h.0.attn.c_attn": 1, "c_proj": 20, "proj": 77},
    },
    "bias all": {"target_modules": ["c_attn"], "bias": "all"},
    "bias lora_only": {"target_modules": ["c_attn", "c_fc"], "bias": "lora_only"},
    "lora_bias": {"target_modules": ["c_attn", "c_fc"], "lora_bias": True},
    "modules_to_save": {"target_modules": ["c_attn"], "modules_to_save": ["ln_f", "h.0.ln_2", "wpe"]},
    "a saved block": {"target_modules": ["c_attn", "c_fc"], "modules_to_save": ["h.1.mlp"]},
    "positions": {"target_modules": ["c_attn", "wpe"], "rank_pattern": {"wpe": 3}},
    "single tokens": {"target_modules": ["c_attn"], "trainable_token_indices": [1, 2]},
    "gaussian": {"target_modules": ["c_attn"], "init_lora_weights": "gaussian", "lora_dropout": 0.1},
    "eva": {"target_modules": ["c_attn"], "init_lora_weights": "eva", "eva_config": EvaConfig()},
    "orthogonal": {"target_modules": ["c_attn"], "init_lora_weights": "orthogonal"},
    "pissa": {"target_modules": ["c_attn"], "init_lora_weights": "pissa"},
    "parameters": {"target_modules": [], "target_parameters": ["h.0.attn.c_attn.weight"]},
    "embedding and head": {"target_modules": ["c_attn", "wte", "lm_head"], "ensure_weight_tying": True},
    "saved embedding and head": {
        "target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"], "ensure_weight_tying": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_merged_logits_equal_those_of_peft(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    adapted = make_adapter(tmp_path, **settings)
    gpt = merged(base, tmp_path)
    assert_changed(gpt, base)
    assert_same(gpt, adapted)


LINEAR = {"target_modules": ["c_attn", "c_fc"]}
TYPES: dict[str, dict[str, Any]] = {
    "LORA": LINEAR,
    "ADALORA": LINEAR | {"total_step": 10},
    "IA3": {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]},
    "LN_TUNING": {"target_modules": ["ln_f", "ln_1"]},
    "TRAINABLE_TOKENS": {"target_modules": ["wte"], "token_indices": [1, 2]},
    "VERA": LINEAR,
    "PVERA": LINEAR,
    "FOURIERFT": LINEAR | {"n_frequency": 20},
    "WAVEFT": LINEAR | {"n_frequency": 20},
    "VBLORA": LINEAR | {"vector_length": 8, "num_vectors": 8, "topk": 2},
    "UNILORA": LINEAR,
    "TINYLORA": LINEAR,
    "RANDLORA": LINEAR | {"r": 4},
    "HIRA": LINEAR,
    "GRALORA": LINEAR,
    "DEFT": LINEAR,
}


@pytest.mark.parametrize("kind", ADAPTER_TYPES)
def test_every_adapter_type_that_is_accepted_merges_as_peft_has_it(base: Path, tmp_path: Path, kind: str) -> None:
    adapted = make_adapter(tmp_path, kind, **TYPES[kind])
    gpt = load_gpt(base)
    old = {name: value.detach() for name, value in gpt.state_dict().items()}
    copies = {name: value.clone() for name, value in old.items()}
    merge_adapter(gpt, tmp_path)
    assert_changed(gpt, base)
    assert_same(gpt, adapted)
    assert all(torch.equal(old[name], copies[name]) for name in old)


def test_the_first_pattern_in_the_file_counts(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=ALL_LINEAR, alpha_pattern={"c_proj": 20, "attn.c_proj": 9, r"h\.1\..*": 2})
    reloaded = PeftModel.from_pretrained(random_model(11, **SHAPE), tmp_path).eval()  # it sorts them when it saves
    assert_same(merged(base, tmp_path), reloaded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_adapter_in_half_precision_and_as_a_bin_file(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    make_adapter(tmp_path, target_modules=ALL_LINEAR)
    tensors = rewrite(tmp_path, lambda state: {key: tensor.to(dtype) for key, tensor in state.items()})
    rounded = PeftModel.from_pretrained(random_model(11, **SHAPE), tmp_path).float().eval()
    gpt = merged(base, tmp_path)
    assert adapter_file(tmp_path).name == "adapter_model.safetensors"
    assert_same(gpt, rounded)
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.float32}
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(tensors, tmp_path / "adapter_model.bin")
    again = merged(base, tmp_path)
    assert adapter_file(tmp_path).name == "adapter_model.bin"
    assert all(torch.equal(again.state_dict()[name], value) for name, value in gpt.state_dict().items())


def test_an_adapter_of_the_network_without_its_head(base: Path, tmp_path: Path) -> None:
    model = random_model(11, **SHAPE)
    headless = GPT2Model(model.config)
    headless.load_state_dict(model.transformer.state_dict())
    adapted = adapt(headless, target_modules=["c_attn", "mlp.c_proj"], rank_pattern={"h.1.mlp.c_proj": 2})
    adapted.save_pretrained(tmp_path)
    assert "base_model.model.h.0.attn.c_attn.lora_A.weight" in load_file(tmp_path / "adapter_model.safetensors")
    model.transformer = adapted
    assert_same(merged(base, tmp_path), model)


def test_masks_among_the_biases_of_old_versions_are_ignored(base: Path, tmp_path: Path) -> None:
    adapted = make_adapter(tmp_path, target_modules=["c_attn"], bias="all")
    rewrite(tmp_path, lambda state: state | {f"{PREFIX}h.0.attn.bias": torch.ones(1, 1, 32, 32).tril()})
    assert_same(merged(base, tmp_path), adapted)


def test_a_stored_head_equal_to_the_embedding_is_taken(base: Path, tmp_path: Path) -> None:
    adapted = make_adapter(tmp_path, target_modules=["c_attn"], modules_to_save=["lm_head"])
    wte = load_gpt(base).wte.weight.detach()
    rewrite(tmp_path, lambda state: state | {"base_model.model.lm_head.weight": wte})
    with torch.no_grad():
        adapted.base_model.model.lm_head.weight.copy_(wte)
    gpt = merged(base, tmp_path)
    assert gpt.config.tie_word_embeddings
    assert_same(gpt, adapted)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["wte"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["c_attn"], "modules_to_save": ["wte"]},
        {"target_modules": ["c_attn"], "modules_to_save": ["wte", "lm_head"]},
        {"target_modules": ["wte"], "ensure_weight_tying": True},  # peft leaves the head as it was all the same
    ],
)
def test_what_parts_head_and_embedding_gives_an_untied_head(
    base: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    adapted = make_adapter(tmp_path, **settings)
    gpt = merged(base, tmp_path)
    assert not gpt.config.tie_word_embeddings
    assert_changed(gpt, base)
    assert_same(gpt, adapted)


def test_an_adapter_on_a_network_with_a_head_of_its_own(base: Path, tmp_path: Path) -> None:
    untied = load_gpt(base)
    untied.untie_head()
    untied.lm_head.weight.data.mul_(-2)
    folder = tmp_path / "untied"
    folder.mkdir()
    save_gpt(untied, folder)
    adapted = adapt(GPT2LMHeadModel.from_pretrained(folder), target_modules=["c_attn", "wte", "lm_head"])
    adapted.save_pretrained(tmp_path)
    gpt = merged(folder, tmp_path)
    assert not gpt.config.tie_word_embeddings
    assert_changed(gpt, folder)
    assert_same(gpt, adapted)


def test_only_changed_weights_are_new_and_nothing_old_changes(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"], bias="all")
    files = {path: path.read_bytes() for path in (base / "model.safetensors", adapter_file(tmp_path))}
    gpt = load_gpt(base)
    old = {name: value.detach() for name, value in gpt.state_dict().items()}
    copies = {name: value.clone() for name, value in old.items()}
    merge_adapter(gpt, tmp_path)
    assert_changed(gpt, base)
    assert all(torch.equal(old[name], copies[name]) for name in old)
    assert all(path.read_bytes() == content for path, content in files.items())
    kept = {name for name, value in gpt.state_dict().items() if value.data_ptr() == old[name].data_ptr()}
    changed = {name for name in old if name.endswith((".bias", "c_attn.weight"))}
    assert kept == old.keys() - changed


def test_settings_that_are_not_honoured_are_named_at_once(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    edit(tmp_path, of_a_later_version={"a": 1}, unset=0, megatron_config={"x": 1}, megatron_core="antigravity")
    assert refusal(base, tmp_path) == (
        f"{tmp_path / 'adapter_config.json'}: of_a_later_version = {{'a': 1}} (written by a newer peft); "
        "megatron_config = {'x': 1} (accepted: null)"
    )
    assert "antigravity" not in sys.modules
    for kind in ("PROMPT_TUNING", "XLORA", "SHADOW", "NONSENSE", None, ["LORA"]):
        edit(tmp_path, peft_type=kind)
        assert f"adapter_config.json: peft_type = {kind!r} (accepted: LORA, ADALORA, IA3, " in refusal(base, tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layer_replication": [[0, 2], [1, 2]]}, "does not fit the network: Could not locate the layers"),
        ({"r": 0}, "does not fit the network: `r` should be a positive integer"),
        ({"lora_alpha": float("nan")}, "peft cannot merge this adapter: NaNs detected in the merged weights"),
        ({"lora_alpha": "x"}, "does not fit the network: "),
        ({"target_modules": "*"}, "does not fit the network: "),
        (
            {"target_modules": ["no_such_module"]},
            "does not fit the network: Target modules {'no_such_module'} not found",
        ),
        ({"rank_pattern": {"(": 3}}, "does not fit the network: "),
        ({"bias": "some"}, "does not fit the network: Requested bias: some"),
        ({"alora_invocation_tokens": [5]}, "peft cannot merge this adapter: aLoRA does not support safe merging"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_merged_are_refused(
    base: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    edit(tmp_path, **settings)
    assert reason in refusal(base, tmp_path)


def test_initialisations_that_the_files_do_not_tell_are_refused(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"], init_lora_weights="pissa_niter_4")
    for start in ("pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga", 3):
        edit(tmp_path, init_lora_weights=start)
        assert f"init_lora_weights = {start!r} (this initialisation changes the base weights)" in refusal(
            base, tmp_path
        )


def test_pissa_that_peft_converted_to_lora_is_merged(base: Path, tmp_path: Path) -> None:
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn"], init_lora_weights="pissa")
    adapted: Any = get_peft_model(random_model(11, **SHAPE), settings)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "initial")
    adapted.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    adapted.eval()
    adapted.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    gpt = merged(base, tmp_path / "lora")
    assert_changed(gpt, base)
    assert_same(gpt, adapted)


def test_a_merge_that_does_not_give_the_adapters_logits_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    monkeypatch.setattr(Linear, "merge", lambda self, **settings: None)
    assert "the logits of the merged network differ from those of the adapter" in refusal(base, tmp_path)


def test_without_peft_the_missing_package_is_named(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        merged(base, tmp_path)
    assert caught.value.name == "peft"


def test_tensors_that_do_not_fit_are_named_at_once(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=ALL_LINEAR, modules_to_save=["ln_f"], rank_pattern={"c_fc": 5})

    def damage(state: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in ("h.0.attn.c_attn.lora_A.weight", "h.1.mlp.c_proj.lora_A.weight", "h.1.mlp.c_proj.lora_B.weight"):
            del state[PREFIX + name]
        del state[f"{PREFIX}ln_f.bias"]
        state[f"{PREFIX}h.0.mlp.c_fc.lora_B.weight"] = torch.ones(96, 4)
        state[f"{PREFIX}h.0.attn.c_proj.lora_A.weight"] = torch.ones(4, 24, dtype=torch.int8)
        odd = [
            f"{C_ATTN}.lora_magnitude_vector",
            f"{PREFIX}h.2.attn.c_attn.lora_A.weight",
            f"{PREFIX}wpe.lora_A.weight",
            "base_model.model.score.weight",
            "transformer.ln_f.weight",
        ]
        return state | {key: torch.ones(23) for key in odd}

    rewrite(tmp_path, damage)
    message = refusal(base, tmp_path)
    for part in (
        f"missing {C_ATTN}.lora_A.weight (4, 24)",
        f"missing {PREFIX}h.1.mlp.c_proj.lora_A.weight (4, 96)",
        f"missing {PREFIX}h.1.mlp.c_proj.lora_B.weight (24, 4)",
        f"missing {PREFIX}ln_f.bias (24,)",
        f"{PREFIX}h.0.mlp.c_fc.lora_B.weight has shape (96, 4), expected (96, 5)",
        f"{PREFIX}h.0.attn.c_proj.lora_A.weight has dtype I8, expected one of F32, F16, BF16",
        f"unexpected {C_ATTN}.lora_magnitude_vector",
        f"unexpected {PREFIX}h.2.attn.c_attn.lora_A.weight",
        "unexpected base_model.model.score.weight",
        f"unexpected {PREFIX}wpe.lora_A.weight",
        "unexpected transformer.ln_f.weight",
    ):
        assert part in message


def test_missing_biases_and_ranks_of_another_setting_are_refused(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    edit(tmp_path, bias="lora_only", r=8)
    message = refusal(base, tmp_path)
    assert f"missing {PREFIX}h.1.attn.c_attn.base_layer.bias (72,)" in message
    assert f"{C_ATTN}.lora_A.weight has shape (4, 24), expected (8, 24)" in message
    assert "ln_1" not in message


def test_numbers_that_are_not_finite_are_refused(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    rewrite(tmp_path, lambda state: state | {f"{C_ATTN}.lora_B.weight": torch.full((72, 4), float("nan"))})
    assert "h.0.attn.c_attn.lora_B.weight holds NaN or infinity" in refusal(base, tmp_path)


def test_folders_without_an_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config\.json in .*expected the folder of a PEFT adapter"):
        merged(base, tmp_path)
    make_adapter(tmp_path, target_modules=["c_attn"])
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"no adapter_model\.safetensors or adapter_model\.bin in"):
        merged(base, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json is not valid JSON"):
        merged(base, tmp_path)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_an_adapter_is_never_run(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=["c_attn"])
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"x": Hostile(tmp_path / "trap")}, tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"asks for posix\.mkdir beside its tensors; code in a pickle is never run"):
        merged(base, tmp_path)
    assert not (tmp_path / "trap").exists()


def test_nothing_is_printed(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path, target_modules=ALL_LINEAR)  # without fan_in_fan_out, of which peft warns
    code = (
        "import sys; from pathlib import Path; from ortgpt_models import load_gpt\n"
        "from ortgpt_exporter.checkpoint.lora import merge_adapter\n"
        "merge_adapter(load_gpt(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, base, tmp_path], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("family", ["gpt2", "openai-gpt"])
@pytest.mark.parametrize("kind", ["SEQ_CLS", "TOKEN_CLS", "no task_type"])
def test_a_classifiers_adapter_is_told_how_to_be_merged(kind: str, family: str, tmp_path: Path) -> None:
    if (kind, family) == ("TOKEN_CLS", "openai-gpt"):
        pytest.skip("transformers has no such class")
    special = {} if family == "openai-gpt" else {"bos_token_id": 0, "eos_token_id": 0}
    shape = {key: value for key, value in SHAPE.items() if not key.endswith("token_id")} | special
    random_model(11, family, **shape).save_pretrained(tmp_path / "base")
    prefix, suffix = ("GPT2" if family == "gpt2" else "OpenAIGPT"), "SequenceClassification"
    classes = AutoModelForSequenceClassification
    if kind == "TOKEN_CLS":
        classes, suffix = AutoModelForTokenClassification, "TokenClassification"
    adapted = adapt(classes.from_pretrained(tmp_path / "base", num_labels=3), task_type=None if "no" in kind else kind,
                    target_modules=["c_attn"], modules_to_save=["classifier", "score"])  # fmt: skip
    adapted.save_pretrained(tmp_path / "adapter")
    message = refusal(tmp_path / "base", tmp_path / "adapter")
    call = f"PeftModel.from_pretrained({prefix}For{suffix}.from_pretrained(BASE, num_labels=3), ADAPTER)"
    assert "it is the adapter of a classifier, and the base is a language model" in message
    assert f"`{call}.merge_and_unload().save_pretrained(OUT)`" in message
    assert f"has the head {'score' if 'Seq' in suffix else 'classifier'} (3, 24)" in message
    # What it says works, and gives what the adapter gives.
    names = {"BASE": tmp_path / "base", "ADAPTER": tmp_path / "adapter", "OUT": tmp_path / "out"}
    eval(re.findall("`(.*)`", message)[0], vars(transformers) | {"PeftModel": PeftModel} | names)
    network = load_network(tmp_path / "out")
    assert isinstance(network, GPTClassifier)
    with torch.no_grad():
        ids = torch.arange(9)[None] * 13 % 60
        expected = adapted(ids).logits  # (1, labels) of the last token, or (1, tokens, labels)
        found = network(ids)
    assert (found if expected.dim() == 3 else found[:, -1]).sub(expected).abs().max() < 1e-4


def test_a_classifiers_adapter_without_its_head_is_told_by_its_task(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path)
    edit(tmp_path, task_type="SEQ_CLS")
    message = refusal(base, tmp_path)
    assert "has the task_type SEQ_CLS: it is the adapter of a classifier" in message
    assert "from_pretrained(BASE, num_labels=N)" in message
