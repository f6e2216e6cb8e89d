"""Find the generation defaults of a checkpoint, as `transformers` finds them, and its special ids. Knows no network.

generation_config.json counts alone if the folder has one; else the settings of generation in config.json count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.contract import File
from ortgpt.errors import OptionError, listed, shown
from ortgpt.options.generation_config import changes_text, read_defaults, settings_not_taken
from ortgpt_exporter.errors import ExportError
from ortgpt_models.files import file_is_there
from ortgpt_models.files import read_json_object as read_config

# The keys of a config.json that `transformers` reads as settings of generation.
GENERATION_KEYS = frozenset(
    {"assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
     "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_config", "cache_implementation",
     "compile_config", "constraints", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
     "diversity_penalty", "do_sample", "dola_layers", "early_stopping", "encoder_no_repeat_ngram_size",
     "encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
     "force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale", "is_assistant",
     "length_penalty", "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size", "max_new_tokens",
     "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_assistant_tokens",
     "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
     "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "penalty_alpha", "prefill_chunk_size",
     "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits", "repetition_penalty",
     "return_dict_in_generate", "sequence_bias", "speculation_type", "stop_strings", "suppress_tokens",
     "target_lookbehind", "temperature", "token_healing", "top_h", "top_k", "top_p", "typical_p", "use_cache",
     "use_mtp", "watermarking_config"}
)  # fmt: skip

_BOS, _EOS = "bos_token_id", "eos_token_id"
_OFF_BELOW_ZERO = ("top_k", "no_repeat_ngram_size", "min_new_tokens")
_ID_KEYS = (_EOS, _BOS, "suppress_tokens", "bad_words_ids")  # those whose ids the runtime compares with the vocabulary


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """How a checkpoint generates by default."""

    bos_token_id: int | None
    """The token that begins a text."""
    eos_token_id: int | None
    """The first of those that end a text."""
    values: Mapping[str, Any]
    """The content of the bundle's generation_config.json; every id in it that is taken has a token."""
    notes: tuple[str, ...]
    """Facts to tell the user, one line each."""


def read_generation_defaults(
    path: Path,
    special: Mapping[str, int | None],
    vocab_size: int,
    *,
    bos_token_id: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> GenerationDefaults:
    """Read the defaults of the checkpoint at `path`, whose network has the ids `special` unless config.json has others.

    `bos_token_id` and `eos_token_ids` replace those of the files. Other ids without a token, of `vocab_size`, are left
    out with a note, as they can never be picked. Raises ExportError for a value that the runtime would refuse, and
    ModelError or BundleError for a damaged file.
    """
    config_path, own_path = path / File.CONFIG, path / File.GENERATION_CONFIG
    config = read_config(config_path, "a Hugging Face folder of GPT-2 or GPT-1") if file_is_there(config_path) else {}
    stated = {key: config[key] for key in config if key in GENERATION_KEYS and changes_text(key, config[key])}
    given = _given_ids(bos_token_id, eos_token_ids, vocab_size)
    ids = {**special, **{key: config[key] for key in (_BOS, _EOS) if key in config}, **given}
    has_own = file_is_there(own_path)
    values = _off_is_zero({**(read_json_object(own_path) if has_own else stated | ids), **given})
    notes = [*_pipeline_notes(config), *(_hidden_notes(stated, values) if has_own else ())]
    without = dict.fromkeys((*_without_token(ids, vocab_size), *_without_token(values, vocab_size)))
    ids, values = _cleaned(ids, vocab_size), _cleaned(values, vocab_size)
    begins = [*_listed(ids[_BOS]), *_listed(values.get(_BOS))]
    ends = [*_listed(ids[_EOS]), *_listed(values.get(_EOS))]
    if values.get(_EOS) is None and ends:
        values[_EOS] = []  # for null, the runtime takes that of config.json
        if not any(key == _EOS for key, _ in without):
            notes.append(
                f"{File.GENERATION_CONFIG} names no eos_token_id, so no token ends a text, as in `transformers`; "
                f"--eos-token-id {ends[0]} lets the one of {File.CONFIG} end it"
            )
    has_end = values.get(_EOS) not in (None, [])
    notes += _without_token_notes(without, vocab_size, has_start=bool(begins or ends), has_end=has_end)
    source = own_path if has_own else config_path
    notes += _not_taken_notes(source.name, values)
    try:
        read_defaults(values, ())
    except OptionError as error:
        raise ExportError(f"{source}: {error}") from None
    return GenerationDefaults(
        bos_token_id=begins[0] if begins else None,
        eos_token_id=ends[0] if ends else None,
        values=values,
        notes=tuple(notes),
    )


def _off_is_zero(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with 0, which is off, for a negative one, which `transformers` ignores in greedy generation."""
    return {
        key: 0 if key in _OFF_BELOW_ZERO and type(value) is int and value < 0 else value
        for key, value in values.items()
    }


def _given_ids(bos_token_id: int | None, eos_token_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return the ids that the caller named, by key. Raises ExportError for one that has no token."""
    named = [(_EOS, token_id) for token_id in eos_token_ids]
    named += [] if bos_token_id is None else [(_BOS, bos_token_id)]
    wrong = [f"{key} = {token_id}" for key, token_id in named if token_id >= vocab_size]
    if wrong:
        raise ExportError(f"{listed(wrong)}: not in the tokenizer (accepted: 0 to {vocab_size - 1})")
    ends = [*eos_token_ids]
    given: dict[str, Any] = {} if bos_token_id is None else {_BOS: bos_token_id}
    return given | ({_EOS: ends[0] if len(ends) == 1 else ends} if ends else {})


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _lacks_token(value: Any, vocab_size: int) -> bool:
    """Tell whether an id, or one of the ids of a word, has no token; what is no id is left to the check of values."""
    return any(type(token_id) is int and not 0 <= token_id < vocab_size for token_id in _listed(value))


def _without_token(values: Mapping[str, Any], vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield key and id, or word, of what has no token."""
    for key in _ID_KEYS:
        yield from ((key, shown(item)) for item in _listed(values.get(key)) if _lacks_token(item, vocab_size))


def _cleaned(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the values without the ids and words that have no token; None in place of a single one, or of all."""
    cleaned = dict(values)
    for key in _ID_KEYS:
        kept = [item for item in _listed(values.get(key)) if not _lacks_token(item, vocab_size)]
        if len(kept) < len(_listed(values.get(key))):
            cleaned[key] = kept or None
    return cleaned


def _without_token_notes(
    without: Collection[tuple[str, str]], vocab_size: int, *, has_start: bool, has_end: bool
) -> Iterator[str]:
    if not without:
        return
    named = [f"{key} = {value}" for key, value in without]
    keys = [key for key in (_BOS, _EOS) if any(key == other for other, _ in without)]
    effects = "" if has_end or _EOS not in keys else "; no token ends a text"
    effects += "" if has_start or not keys else "; an empty prompt lacks a token to start from"
    options = " and ".join(f"--{key.replace('_', '-')}" for key in keys)
    what_to_do = f"; if the tokenizer has such tokens, name them ({options})" if keys else ""
    yield (
        f"{listed(named)}: the tokenizer has no such id (it has 0 to {vocab_size - 1}), so it is never generated"
        f"{effects}{what_to_do}"
    )


def _pipeline_notes(config: Mapping[str, Any]) -> Iterator[str]:
    tasks = config.get("task_specific_params")
    settings = tasks.get("text-generation") if isinstance(tasks, dict) else None
    if isinstance(settings, dict) and settings:
        named = listed([f"{key} = {shown(value)}" for key, value in settings.items()])
        yield (
            f"{File.CONFIG} has task_specific_params of text-generation, which neither `generate` of `transformers` "
            f"nor ortgpt reads: {named}"
        )


def _hidden_notes(stated: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    hidden = [f"{key} = {shown(value)}" for key, value in stated.items() if key != _EOS and values.get(key) != value]
    if hidden:
        yield (
            f"{File.CONFIG} has settings that do not count beside a {File.GENERATION_CONFIG}, as in `transformers`: "
            f"{listed(hidden)}"
        )


def _not_taken_notes(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    ignored = settings_not_taken(values)
    if ignored:
        yield (
            f"{name} has settings that are no defaults of a bundle: {listed(ignored)}; give those that ortgpt has with "
            "each call (`ortgpt generate --help` lists them)"
        )
