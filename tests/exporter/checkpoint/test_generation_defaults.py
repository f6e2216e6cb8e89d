"""The defaults of a bundle are what `transformers` generates by from the same folder; what is not taken is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GPT2LMHeadModel

import ortgpt
from ortgpt import OptionError, PromptError
from ortgpt.options.generation_config import changes_text
from ortgpt_exporter import CheckpointSource, ExportError, export_bundle
from ortgpt_exporter.checkpoint.generation_defaults import GENERATION_KEYS, read_generation_defaults
from ortgpt_exporter.checkpoint.load import load_checkpoint
from support import reseal, write_checkpoint

PROMPT = [5, 6, 7]
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("defaults") / "model")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint without a generation_config.json."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / "generation_config.json").unlink()
    return folder


def configure(folder: Path, config: dict[str, Any], own: dict[str, Any] | None = None) -> None:
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    if own is not None:
        (folder / "generation_config.json").write_text(json.dumps(own))


def their_ids(folder: Path, **options: Any) -> list[int]:
    """Return what `transformers` generates from the folder."""
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    inputs = torch.tensor([PROMPT])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, **options)
    ids: list[int] = output[0, len(PROMPT) :].tolist()
    return ids


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> Path:
    return export_bundle(checkpoint, checkpoint.parent / "bundle").path


def our_ids(folder: Path, exported: Path, **options: Any) -> list[int]:
    """Return what a bundle of the folder generates: the exported one, which has its graph, with its defaults."""
    out = folder.parent / "bundle"
    shutil.copytree(exported, out, dirs_exist_ok=True)
    loaded = load_checkpoint(CheckpointSource(folder))
    (out / "config.json").write_text(json.dumps(loaded.gpt.config.to_dict()))
    (out / "generation_config.json").write_text(json.dumps(loaded.generation_config))
    reseal(out)
    with ortgpt.load(out) as generator:
        return generator.generate(PROMPT, **options).token_ids


CASES: list[tuple[dict[str, Any], dict[str, Any] | None, bool]] = [
    # settings of config.json, a generation_config.json beside it, and whether the ids differ from those without both
    ({"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}, None, True),
    ({"repetition_penalty": 1.5}, {}, False),
    ({"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.7}, True),
    ({"suppress_tokens": [8, 296]}, None, True),
    ({"suppress_tokens": [8, 999, -1]}, None, True),
    ({"bad_words_ids": [[8], [55, 225]]}, None, True),
    ({}, {"bad_words_ids": [[8, 8]]}, True),
    ({"eos_token_id": [0, 55]}, None, True),
    ({"eos_token_id": 55}, None, True),
    ({"eos_token_id": 50256, "bos_token_id": 50256}, None, False),
    ({"eos_token_id": -1, "bos_token_id": -1}, None, False),
    ({}, {"eos_token_id": [999, 55, -1]}, True),
    ({"eos_token_id": 55}, {"eos_token_id": 999}, False),
    ({"eos_token_id": 55, "min_new_tokens": 9}, None, True),
    ({"pad_token_id": 999}, None, False),
    ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "typical_p": 0.5}, None, False),
    ({"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}, None, False),
]  # fmt: skip


@pytest.mark.parametrize(("config", "own", "differs"), CASES)
def test_ids_are_those_of_transformers(
    config: dict[str, Any], own: dict[str, Any] | None, differs: bool, folder: Path, exported: Path
) -> None:
    plain = their_ids(folder, max_new_tokens=16)
    configure(folder, config, own)
    theirs = their_ids(folder, max_new_tokens=16)
    assert our_ids(folder, exported, max_new_tokens=16) == theirs
    assert (theirs != plain) == differs


def test_the_length_of_config_json_is_taken(folder: Path, exported: Path) -> None:
    configure(folder, {"max_new_tokens": 5})
    assert our_ids(folder, exported) == their_ids(folder)
    assert len(our_ids(folder, exported)) == 5


def test_sampling_is_taken(folder: Path, exported: Path) -> None:
    configure(folder, {"do_sample": True, "temperature": 5.0})
    assert our_ids(folder, exported, max_new_tokens=16, seed=1) != our_ids(
        folder, exported, max_new_tokens=16, do_sample=False
    )


def test_the_keys_are_those_of_transformers() -> None:
    metadata = {"transformers_version", "_from_model_config", "_commit_hash"}
    assert set(GenerationConfig().to_dict()) - metadata == GENERATION_KEYS
    neutral = GenerationConfig()._get_default_generation_params()
    del neutral["max_length"], neutral["do_sample"]  # these change the text whatever their value is
    assert [key for key, value in neutral.items() if changes_text(key, value)] == []


def notes_of(folder: Path, vocab_size: int = 300, **ids: Any) -> Iterator[str]:
    yield from read_generation_defaults(folder, SPECIAL, vocab_size, **ids).notes


NOT_TAKEN = {
    "num_beams": 4, "length_penalty": 0.5, "early_stopping": True, "max_length": 50, "min_length": 3, "top_h": 0.5,
    "forced_bos_token_id": 4, "forced_eos_token_id": 4, "begin_suppress_tokens": [4], "max_time": 3.0,
    "exponential_decay_length_penalty": [3, 1.5], "sequence_bias": [[[4], -1.0]], "num_return_sequences": 2,
    "encoder_repetition_penalty": 1.2, "penalty_alpha": 0.6, "diversity_penalty": 0.1, "num_beam_groups": 2,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "stop_strings": ["a"], "guidance_scale": 1.5, "token_healing": True,
    "renormalize_logits": True, "remove_invalid_values": True, "watermarking_config": {"bias": 2.5},
    "encoder_no_repeat_ngram_size": 2, "force_words_ids": [[4]], "constraints": [1], "dola_layers": "low",
}  # fmt: skip


@pytest.mark.parametrize("key", NOT_TAKEN)
def test_what_is_not_taken_is_named(key: str, folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        value = NOT_TAKEN[key]
        configure(folder, {key: value}, {key: value, "eos_token_id": 0} if name != "config.json" else None)
        (note,) = notes_of(folder)
        assert note.startswith(f"{name} has settings that are no defaults of a bundle: {key} = {value!r}; give")
        assert read_generation_defaults(folder, SPECIAL, 300).values[key] == value  # other programs may take it


def test_what_is_hidden_and_what_pipelines_read_is_named(folder: Path) -> None:
    task = {"text-generation": {"do_sample": True, "max_length": 50}, "translation": {"num_beams": 4}}
    configure(
        folder, {"top_k": 5, "temperature": 0.7, "task_specific_params": task}, {"temperature": 0.7, "eos_token_id": 0}
    )
    pipelines, hidden = notes_of(folder)
    assert pipelines.endswith("nor ortgpt reads: do_sample = True; max_length = 50")
    assert hidden == (
        "config.json has settings that do not count beside a generation_config.json, as in `transformers`: top_k = 5"
    )


def test_ids_without_a_token_are_told_with_what_to_do(folder: Path) -> None:
    configure(folder, {"eos_token_id": 50256, "bos_token_id": 50256})
    (note,) = notes_of(folder)
    assert note == (
        "eos_token_id = 50256; bos_token_id = 50256: the tokenizer has no such id (it has 0 to 299), so it is never "
        "generated; no token ends a text; an empty prompt lacks a token to start from; if the tokenizer "
        "has such tokens, name them (--bos-token-id and --eos-token-id)"
    )
    defaults = read_generation_defaults(folder, SPECIAL, 300, bos_token_id=3, eos_token_ids=[0, 7])
    assert (defaults.bos_token_id, defaults.eos_token_id, defaults.notes) == (3, 0, ())
    assert defaults.values == {"bos_token_id": 3, "eos_token_id": [0, 7]}
    assert read_generation_defaults(folder, SPECIAL, 300, eos_token_ids=[7]).values["eos_token_id"] == 7
    configure(folder, {}, {"eos_token_id": [50256, 9], "suppress_tokens": [50257], "bad_words_ids": [[1, 300], [2]]})
    defaults = read_generation_defaults(folder, SPECIAL, 300)
    assert defaults.values == {
        "eos_token_id": [9], "suppress_tokens": None, "bad_words_ids": [[2]],
    }  # fmt: skip
    assert (defaults.bos_token_id, defaults.eos_token_id) == (None, 9)
    (note,) = defaults.notes
    assert "suppress_tokens = 50257; bad_words_ids = [1, 300]: the tokenizer has no such id" in note
    assert "no token ends" not in note
    configure(folder, {}, {"eos_token_id": [0, 50256]})  # 0 is an id like any other
    (note,) = read_generation_defaults(folder, SPECIAL, 300).notes
    assert "no token ends" not in note


def test_an_end_that_generation_config_does_not_name_ends_nothing(folder: Path) -> None:
    for own in ({"do_sample": False}, {"eos_token_id": None}):
        configure(folder, {"eos_token_id": 55}, own)
        defaults = read_generation_defaults(folder, SPECIAL, 300)
        assert (defaults.values["eos_token_id"], defaults.eos_token_id) == ([], 55)
        assert defaults.notes == (
            "generation_config.json names no eos_token_id, so no token ends a text, as in `transformers`; "
            "--eos-token-id 55 lets the one of config.json end it",
        )
    assert read_generation_defaults(folder, SPECIAL, 300, eos_token_ids=[55]).values["eos_token_id"] == 55


def test_a_negative_number_leaves_a_setting_off(folder: Path) -> None:
    configure(folder, {"top_k": -1, "no_repeat_ngram_size": -1, "min_new_tokens": -3})
    values = read_generation_defaults(folder, SPECIAL, 300).values
    assert [values[key] for key in ("top_k", "no_repeat_ngram_size", "min_new_tokens")] == [0, 0, 0]


def test_ids_that_are_named_have_to_have_a_token(folder: Path) -> None:
    with pytest.raises(ExportError, match=r"eos_token_id = 300: not in the tokenizer \(accepted: 0 to 299\)"):
        read_generation_defaults(folder, SPECIAL, 300, eos_token_ids=[0, 300])
    with pytest.raises(ExportError, match=r"bos_token_id = 300: not in the tokenizer"):
        read_generation_defaults(folder, SPECIAL, 300, bos_token_id=300)
    for ids in ({"eos_token_id": -1}, {"eos_token_id": "0"}, {"bos_token_id": -1}, {"bos_token_id": 1.5}):
        with pytest.raises(OptionError, match=r"_token_id = .* \(accepted: "):
            CheckpointSource(folder, **ids)


def test_a_bundle_without_a_start_says_what_is_missing(folder: Path) -> None:
    configure(folder, {"eos_token_id": 50256, "bos_token_id": 50256})
    notes: list[str] = []
    out = export_bundle(folder, folder.parent / "bundle", on_note=notes.append).path
    assert len(notes) == 1
    with ortgpt.load(out) as generator:
        assert generator.generate(PROMPT, max_new_tokens=16).token_ids == their_ids(folder, max_new_tokens=16)
        with pytest.raises(PromptError, match=r"no token to start a text from, .* again with --bos-token-id$"):
            generator.generate("")
    out = export_bundle(CheckpointSource(folder, bos_token_id=0), folder.parent / "started").path
    with ortgpt.load(out) as generator:
        assert generator.score("Some text").perplexity > 1
        assert len(generator.generate("", max_new_tokens=4).token_ids) == 4
