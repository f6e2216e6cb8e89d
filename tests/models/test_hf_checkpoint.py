from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from ortgpt_models import GPT, ModelError, load_gpt, save_gpt, weight_files
from support import random_model, write_checkpoint

SHAPE = {
    "vocab_size": 300,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", seed=5)


def rewrite(folder: Path, change: object) -> dict[str, torch.Tensor]:
    """Apply `change` to the tensors of a checkpoint and store them again."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed: dict[str, torch.Tensor] = change(tensors)  # type: ignore[operator]
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, path, metadata={"format": "pt"})
    return changed


@torch.no_grad()
def assert_same_as_transformers(folder: Path) -> None:
    ids = torch.arange(40)[None] * 7 % 300
    theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert (load_gpt(folder)(ids) - theirs(ids).logits).abs().max() <= 1e-4


def load_with_notes(folder: Path) -> tuple[GPT, list[str]]:
    notes: list[str] = []
    return load_gpt(folder, on_note=notes.append), notes


def test_folder_written_by_transformers(folder: Path) -> None:
    assert "transformer.wte.weight" in load_file(folder / "model.safetensors")
    assert_same_as_transformers(folder)


def test_names_without_prefix_and_with_old_mask_buffers(folder: Path) -> None:
    expected = load_gpt(folder).state_dict()

    def to_openai(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
        masked = {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
        return plain | masks | masked

    rewrite(folder, to_openai)
    state = load_gpt(folder).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_widened(folder: Path, dtype: torch.dtype) -> None:
    stored = rewrite(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    wte = load_gpt(folder).wte.weight
    assert wte.dtype == torch.float32
    assert torch.equal(wte, stored["transformer.wte.weight"].float())


def test_every_fault_is_named_at_once(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors["transformer.h.1.ln_2.weight"], tensors["transformer.ln_f.bias"]
        tensors["transformer.wpe.weight"] = torch.zeros(63, 48)
        tensors["transformer.h.0.attn.c_attn.bias"] = torch.zeros(144, dtype=torch.int8)
        return tensors | {
            "transformer.h.2.ln_1.bias": torch.zeros(48),
            "transformer.h.0.crossattention.c_attn.weight": torch.zeros(48, 96),
        }

    rewrite(folder, damage)
    with pytest.raises(ModelError) as caught:
        load_gpt(folder)
    message = str(caught.value)
    for part in (
        "missing h.1.ln_2.weight (48,)",
        "missing ln_f.bias (48,)",
        "transformer.wpe.weight has shape (63, 48), expected (64, 48)",
        "transformer.h.0.attn.c_attn.bias has dtype I8",
        "unexpected transformer.h.2.ln_1.bias (n_layer = 2)",
        "unexpected transformer.h.0.crossattention.c_attn.weight",
    ):
        assert part in message


def test_a_head_equal_to_the_embedding_is_tied_to_it(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()})
    gpt, notes = load_with_notes(folder)
    assert gpt.config.tie_word_embeddings
    assert not any("lm_head" in name for name in gpt.state_dict())
    assert notes == []


@pytest.mark.parametrize("tied", [True, False, None])
def test_another_head_is_taken_as_transformers_takes_it(folder: Path, tied: bool | None) -> None:
    values = json.loads((folder / "config.json").read_text())
    del values["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(values | ({} if tied is None else {"tie_word_embeddings": tied})))
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["transformer.wte.weight"].flip(0) * 2})
    gpt, notes = load_with_notes(folder)
    assert not gpt.config.tie_word_embeddings
    assert_same_as_transformers(folder)
    assert bool(notes) == (tied is not False)
    assert all("lm_head.weight differs from the token embedding, though config.json ties" in note for note in notes)


def test_a_head_that_is_not_finite_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": torch.full((300, 48), float("nan"))})
    with pytest.raises(ModelError, match=r"lm_head\.weight holds NaN or infinity"):
        load_gpt(folder)


def test_the_embedding_of_a_file_that_stores_only_the_tied_head(folder: Path) -> None:
    def keep_the_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {("lm_head.weight" if "wte" in key else key): value for key, value in state.items()}

    rewrite(folder, keep_the_head)
    gpt, notes = load_with_notes(folder)
    assert gpt.config.tie_word_embeddings
    assert_same_as_transformers(folder)
    assert [note for note in notes if "lm_head.weight, which is tied to it, was read" in note]
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing wte\.weight \(300, 48\)$"):
        load_gpt(folder)


@pytest.mark.parametrize(
    ("before", "wrapper", "has_base"),
    [
        ("module.transformer.", "module.", True),
        ("_orig_mod.transformer.", "_orig_mod.", True),
        ("module._orig_mod.transformer.", "module._orig_mod.", True),
        ("base_model.model.transformer.", "base_model.model.", True),
        ("net.transformer.", "net.", True),
        ("model.", "model.", False),
        ("gpt2.", "gpt2.", False),
        ("transformer.transformer.", "transformer.", True),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "bin", "shards"])
def test_a_prefix_before_all_tensors_is_removed(
    folder: Path, kind: str, before: str, wrapper: str, has_base: bool
) -> None:
    expected = load_gpt(folder).state_dict()

    def wrap(state: dict[str, Tensor]) -> dict[str, Tensor]:
        head = state["transformer.wte.weight"] * 3
        wrapped = {before + key.removeprefix("transformer."): value for key, value in state.items()}
        return wrapped | {(wrapper if has_base else "") + "lm_head.weight": head}

    if kind == "bin":
        write_bin(folder, wrap)
    else:
        rewrite(folder, wrap)
    if kind == "shards":
        shard(folder, "safetensors")
    gpt, notes = load_with_notes(folder)
    state = gpt.state_dict()
    assert torch.equal(state.pop("lm_head.weight"), expected["wte.weight"] * 3)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert any(f"the prefix {wrapper} before the network's tensors, as in {before}" in note for note in notes)


@pytest.mark.parametrize("wrapper", ["model.model.", "model.model.gpt.", "a.b.c."])
def test_the_head_of_a_wrapped_network_may_be_levels_above_it(folder: Path, wrapper: str) -> None:
    def wrap(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors["transformer.wte.weight"] * 3
        return {wrapper + key.removeprefix("transformer."): value for key, value in tensors.items()} | {
            "lm_head.weight": head
        }

    expected = load_gpt(folder).state_dict()
    rewrite(folder, wrap)
    notes: list[str] = []
    state = load_gpt(folder, on_note=notes.append).state_dict()
    assert torch.equal(state.pop("lm_head.weight"), expected["wte.weight"] * 3)
    assert state.keys() == expected.keys()
    assert not any("left out, as" in note for note in notes)


def test_a_prefix_that_is_not_one_is_said_to_be_the_matter(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    keys = sorted(whole)

    def lines(tensors: dict[str, Tensor]) -> str:
        rewrite(folder, lambda state: tensors)
        with pytest.raises(ModelError) as caught:
            load_gpt(folder)
        assert "missing" not in str(caught.value)
        return str(caught.value)

    both = {f"{name}.{key}": whole[key].clone() for name in ("actor", "critic") for key in keys}
    assert "holds 2 networks, with the prefixes actor., critic.; keep the tensors of one" in lines(both)
    half = {("module." if index % 2 else "") + key: whole[key] for index, key in enumerate(keys)}
    assert "have different prefixes (14 with none, 14 with module.); give all of them" in lines(half)
    other = {"model.embed_tokens.weight": torch.ones(3), "model.norm.weight": torch.ones(3)}
    assert "none of the 2 tensors is one of this network, which has wte.weight and h.0" in lines(other)
    assert "found: model.embed_tokens.weight, model.norm.weight" in lines(other)


def test_of_two_networks_the_one_that_transformers_finds_is_taken(folder: Path) -> None:
    rewrite(folder, lambda state: state | {f"ref.{key}": value * 2 for key, value in state.items()})
    assert_same_as_transformers(folder)
    _, notes = load_with_notes(folder)
    assert len(notes) == 1
    assert "ref.transformer.h.0.attn.c_attn.bias" in notes[0]
    assert "and 22 more" in notes[0]


@pytest.mark.parametrize(
    "head",
    [
        "v_head.summary.weight", "multiple_choice_head.summary.weight", "score.weight", "classifier.bias",
        "qa_outputs.weight", "summary.summary.bias", "lm_head.bias", "lm_head.decoder.weight",
    ],
)  # fmt: skip
def test_a_head_beside_the_language_model_is_left_out_with_a_note(folder: Path, head: str) -> None:
    rewrite(folder, lambda state: state | {head: torch.ones(300, 48)})
    assert_same_as_transformers(folder)
    _, notes = load_with_notes(folder)
    assert len(notes) == 1
    assert head in notes[0]


def test_the_language_model_of_a_classifier(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["GPT2ForSequenceClassification"])
    rewrite(folder, lambda state: state | {"score.weight": torch.ones(2, 48)})
    assert_same_as_transformers(folder)
    _, notes = load_with_notes(folder)
    assert len(notes) == 2
    assert "score.weight" in notes[0]
    assert "GPT2ForSequenceClassification; only its language model was taken, whose head is the token" in notes[1]


def test_a_tensor_with_and_without_prefix_is_a_fault(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"ln_f.bias": torch.ones(48)})
    with pytest.raises(ModelError, match=r"ln_f\.bias occurs twice, as .*transformer\.ln_f\.bias"):
        load_gpt(folder)


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in"):
        load_gpt(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        load_gpt(folder)
    (folder / "model.safetensors").rename(folder / "weights.h5")
    for call in (load_gpt, weight_files):
        with pytest.raises(ModelError, match=r"no model\.safetensors, .*found: weights\.h5"):
            call(folder)
    with pytest.raises(ModelError, match="is not a folder"):
        weight_files(folder / "nowhere")
    for text, reason in (("{", "not valid JSON"), ("[1]", "JSON list"), ("[" * 100_000, "not valid JSON")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=reason):
            load_gpt(folder)


@pytest.mark.parametrize(
    ("names", "config", "how"),
    [
        (["model.ckpt.index", "hparams.json"], False, r"no config\.json in .*; model\.ckpt\.index is TensorFlow's"),
        (
            ["model.ckpt.index", "hparams.json"],
            True,
            r"\(weights found: model\.ckpt\.index\); .*--gpt2_checkpoint_path",
        ),
        (["tf_model.h5"], True, r"found: tf_model\.h5\); tf_model\.h5 is TensorFlow's: .*from_tf=True"),
        (["flax_model.msgpack"], True, r"flax_model\.msgpack is Flax's: .*from_flax=True"),
        (["gpt2-q8.gguf"], True, r"gpt2-q8\.gguf is llama\.cpp's: .*gguf_file=NAME"),
        (["other.pt"], True, r"found: other\.pt\); save_pretrained of `transformers` writes the expected files"),
    ],
)
def test_weights_of_other_programs_say_how_to_convert_them(
    folder: Path, names: list[str], config: bool, how: str
) -> None:
    (folder / "model.safetensors").unlink()
    if not config:
        (folder / "config.json").unlink()
    for name in names:
        (folder / name).write_bytes(b"")
    with pytest.raises(ModelError, match=how):
        load_gpt(folder)


def write_bin(folder: Path, change: Any = lambda state: state, *, legacy: bool = False) -> dict[str, Tensor]:
    """Store the tensors of a checkpoint, changed, as pytorch_model.bin in the place of its safetensors file."""
    path = folder / "model.safetensors"
    state: dict[str, Tensor] = change(load_file(path))
    path.unlink()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return state


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard(folder: Path, kind: str, *, keys_a_file: int = 5) -> dict[str, str]:
    """Split a checkpoint into shards with an index, of `safetensors` or `bin`; return the file of each key."""
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = list(tensors)
    parts = [keys[start : start + keys_a_file] for start in range(0, len(keys), keys_a_file)]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"{stem}-{number:05}-of-{len(parts):05}.{suffix}"
        weight_map |= dict.fromkeys(part, name)
        state = {key: tensors[key] for key in part}
        if kind == "safetensors":
            save_file(state, folder / name, metadata={"format": "pt"})
        else:
            torch.save(state, folder / name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return weight_map


@pytest.mark.parametrize(
    "config",
    [
        {"n_inner": 77},
        {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
        {"scale_attn_weights": False, "reorder_and_upcast_attn": True},
        {"n_layer": 6, "summary_type": "cls_index", "summary_use_proj": True, "n_ctx": 64},
        {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    ],
    ids=["n_inner", "inverse-layer", "unscaled", "distilgpt2", "gelu"],
)
def test_networks_of_other_shapes(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_same_as_transformers(write_checkpoint(tmp_path / "checkpoint", seed=3, **config))


def test_shards_written_by_transformers(tmp_path: Path) -> None:
    random_model(4, **SHAPE).save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 5
    assert weight_files(tmp_path) == shards
    assert_same_as_transformers(tmp_path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bin_file(folder: Path, dtype: torch.dtype, legacy: bool) -> None:
    stored = write_bin(folder, lambda state: {key: value.to(dtype) for key, value in state.items()}, legacy=legacy)
    assert weight_files(folder) == [folder / "pytorch_model.bin"]
    state = load_gpt(folder).state_dict()
    assert state.keys() == {key.removeprefix("transformer.") for key in stored}
    assert all(torch.equal(state[key.removeprefix("transformer.")], value.float()) for key, value in stored.items())
    assert_same_as_transformers(folder)


def test_shards_of_bin_files(folder: Path) -> None:
    expected = load_gpt(folder).state_dict()
    names = set(shard(folder, "bin").values())
    assert weight_files(folder) == [folder / name for name in sorted(names)]
    state = load_gpt(folder).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert_same_as_transformers(folder)


def test_a_file_of_mixed_precision(folder: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    rewrite(folder, lambda state: {key: state[key].to(dtypes[i % 3]) for i, key in enumerate(state)})
    assert all(parameter.dtype == torch.float32 for parameter in load_gpt(folder).parameters())
    assert_same_as_transformers(folder)


@pytest.mark.parametrize("head", ["lm_head.weight", "lm_head.decoder.weight"])
def test_dialogpt_with_float16_masks_and_its_own_head(tmp_path: Path, head: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", seed=6, n_layer=3)

    def to_dialogpt(state: dict[str, Tensor]) -> dict[str, Tensor]:
        half = {key: value.half() for key, value in state.items()}
        masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril() for i in range(3)}
        masked = {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4).half() for i in range(3)}
        return half | masks | masked | {head: half["transformer.wte.weight"]}

    write_bin(folder, to_dialogpt, legacy=True)
    edit_json(folder / "config.json", n_ctx=64, n_special=0, predict_special_tokens=True, torch_dtype="float16")
    assert_same_as_transformers(folder)


def test_the_first_of_several_sources_is_read(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder, "safetensors")
    shards = weight_files(folder)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert weight_files(folder) == shards
    load_gpt(folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "model.safetensors.index.json").write_bytes(b"never read")
    assert weight_files(folder) == [folder / "model.safetensors"]
    load_gpt(folder)


def test_float32_weights_stay_in_the_file_which_no_change_reaches(folder: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if name == "pytorch_model.bin":
            write_bin(folder)
        before = (folder / name).read_bytes()
        gpt = load_gpt(folder)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.zero_()
        assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_every_fault_of_an_index_is_named_at_once(folder: Path, kind: str) -> None:
    weight_map = shard(folder, kind)
    keys, names = list(weight_map), sorted(set(weight_map.values()))
    (index,) = folder.glob("*.index.json")
    (folder / names[0]).write_bytes(b"damaged")
    wrong = weight_map | {keys[5]: names[2], "transformer.ln_f.gain": names[1]}
    (folder / names[3]).write_bytes((folder / names[2]).read_bytes())
    edit_json(index, weight_map=wrong)
    with pytest.raises(ModelError) as caught:
        load_gpt(folder)
    message = str(caught.value)
    for part in (
        f"{names[0]} is not a",
        f"{keys[5]}, which should be in {names[2]}, is in {names[1]}",
        f"transformer.ln_f.gain, which should be in {names[1]}, is in none",
        f"{keys[10]} is both in {names[2]} and in {names[3]}",
        f"{keys[15]}, which should be in {names[3]}, is in none",
    ):
        assert part in message
    assert keys[0] not in message  # it is in the damaged file
    for name in names[:2]:
        (folder / name).unlink()
    for call in (load_gpt, weight_files):
        with pytest.raises(ModelError, match=f"{names[0]}, {names[1]}"):
            call(folder)


def test_an_index_names_files_of_its_own_folder_only(folder: Path) -> None:
    shard(folder, "safetensors")
    index = folder / "model.safetensors.index.json"
    names: list[Any] = [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\\b",
        "c:b",
        "a\nb",
        "\ud800",
        7,
    ]
    edit_json(index, weight_map={f"key{i}": name for i, name in enumerate(names)})
    for call in (load_gpt, weight_files):
        with pytest.raises(ModelError) as caught:
            call(folder)
        assert all(repr(name) in str(caught.value) for name in names)
    maps: list[Any] = [None, [], {}, "x"]
    for weight_map in maps:
        edit_json(index, weight_map=weight_map)
        with pytest.raises(ModelError, match=r"weight_map is .*expected an object"):
            load_gpt(folder)
    for text in ("[1]", "{", "\ud800"):
        index.write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(ModelError, match=r"index\.json (is not valid JSON|holds a JSON list|is not UTF-8)"):
            load_gpt(folder)


def test_a_key_in_no_shard_is_missing(folder: Path) -> None:
    rewrite(folder, lambda state: {key: value for key, value in state.items() if key != "transformer.ln_f.bias"})
    shard(folder, "safetensors")
    with pytest.raises(ModelError, match=r"index\.json: .*missing ln_f\.bias \(48,\)"):
        load_gpt(folder)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_that_are_not_finite_are_named(folder: Path, kind: str) -> None:
    def spoil(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state["transformer.h.1.mlp.c_fc.weight"][3, 4] = float("nan")
        state["transformer.h.0.ln_1.bias"][0] = float("-inf")
        state["transformer.ln_f.weight"][:] = 3e38  # finite, though their sum is not
        return state

    if kind == "safetensors":
        rewrite(folder, spoil)
    else:
        write_bin(folder, spoil)
    with pytest.raises(ModelError) as caught:
        load_gpt(folder)
    assert "h.1.mlp.c_fc.weight holds NaN or infinity" in str(caught.value)
    assert "h.0.ln_1.bias holds NaN or infinity" in str(caught.value)
    assert "ln_f" not in str(caught.value)


def test_an_untied_configuration_is_taken_when_the_head_is_tied_after_all(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing lm_head\.weight.*tie_word_embeddings = false"):
        load_gpt(folder)
    rewrite(folder, lambda state: state | {"lm_head.weight": state["transformer.wte.weight"].clone()})
    assert_same_as_transformers(folder)
    assert load_gpt(folder).config.tie_word_embeddings
    rewrite(folder, lambda state: state | {"lm_head.weight": torch.ones(301, 48)})
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \(301, 48\), expected \(300, 48\)"):
        load_gpt(folder)


def test_fewer_positions_than_the_configuration_says_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", n_positions=65)
    with pytest.raises(ModelError, match=r"wpe\.weight has shape \(64, 48\), expected \(65, 48\)"):
        load_gpt(folder)


def test_a_bin_that_is_no_state_dict_is_refused(folder: Path) -> None:
    contents: list[tuple[Any, str]] = [
        ([torch.ones(1)], "holds a list; expected a state dict"),
        ({"epoch": 3, "state_dict": {}}, "'epoch' is a int; 'state_dict' is a dict"),
        ({"wte.weight": torch.eye(3).to_sparse()}, "wte.weight has dtype torch.sparse_coo"),
        ({"wte.weight": torch.ones(300, 48, dtype=torch.int8)}, "wte.weight has dtype int8"),
    ]
    (folder / "model.safetensors").unlink()
    for content, reason in contents:
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=reason):
            load_gpt(folder)


@torch.no_grad()
def test_what_is_written_loads_in_transformers(folder: Path, tmp_path: Path) -> None:
    gpt = load_gpt(folder)
    out = tmp_path / "again"
    out.mkdir()
    save_gpt(gpt, out, dtype=torch.float16)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    half = load_gpt(out)
    assert torch.equal(half.wte.weight, gpt.wte.weight.half().float())
    assert_same_as_transformers(out)


@torch.no_grad()
def test_an_untied_network_survives_a_round_trip(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda state: state | {"lm_head.weight": state["transformer.wte.weight"].flip(1)})
    gpt = load_gpt(folder)
    out = tmp_path / "again"
    out.mkdir()
    save_gpt(gpt, out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    again, notes = load_with_notes(out)
    assert notes == []
    assert all(torch.equal(tensor, gpt.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert "lm_head.weight" in again.state_dict()
    assert_same_as_transformers(out)


def test_small_tokenizer_is_a_transformers_tokenizer(folder: Path) -> None:
    assert AutoTokenizer.from_pretrained(folder)("a truth").input_ids
