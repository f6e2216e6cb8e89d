"""Read the tokenizer files of a checkpoint, in any form that Hugging Face folders have, and give those of a bundle.

A tokenizer that the runtime cannot reproduce token for token is refused, with the reason. Knows no network and no hub.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.files import read_text
from ortgpt.contract import File
from ortgpt.errors import listed, shown
from ortgpt.text.bpe_files import MAX_IDS, parse_merges, read_vocab
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.checkpoint.merge_check import Pair, unreachable_merges
from ortgpt_exporter.checkpoint.special_tokens import SPECIAL_TOKENS_MAP, declared_tokens, number_tokens, token_roles
from ortgpt_exporter.checkpoint.tokenizer_json import as_object, read_tokenizer_json
from ortgpt_exporter.checkpoint.tokenizer_names import ADDED_TOKENS, MERGES_NAMES, VOCAB_NAMES, describe_others
from ortgpt_exporter.errors import ExportError
from ortgpt_models.files import file_is_there
from ortgpt_models.files import read_json_object as read_config

# Flags of an added token that depend on the text beside it.
_FLAGS = ("lstrip", "rstrip", "single_word")
# Far more than any tokenizer has; checking the merges takes about 3 microseconds a letter.
_MAX_LETTERS_IN_TOKEN = 2**14
_MAX_LETTERS = 2**22


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer that the runtime reproduces."""

    texts: Mapping[str, str]
    """The text of each tokenizer file of the bundle, by the file's name."""
    vocab: Mapping[str, int]
    """The id of every token, of added tokens too; each byte of a token is one of GPT-2's 256 letters."""
    tokenizer: Tokenizer
    """The tokenizer as the runtime runs it."""
    numbered: Mapping[str, int] = field(default_factory=dict)
    """The special tokens among them that the files declare without an id, each with the id that it got."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The named special tokens that the files declare, by name: {"pad_token": "<|pad|>"}."""
    tokenizer_json: str | None = None
    """The folder's own tokenizer.json, if that is a whole tokenizer."""
    notes: tuple[str, ...] = ()
    """Facts to tell the user, one line each."""


def read_tokenizer(path: Path, *, rows: int = MAX_IDS) -> TokenizerFiles:
    """Read vocab.json and merges.txt, or else tokenizer.json, and the tokens that other files add to them.

    `path` is a folder, or a file that holds what a tokenizer.json does. OpenAI's names, encoder.json and vocab.bpe, are
    accepted. Special tokens that are declared without an id get one as in `transformers`. Of a model with `rows` rows,
    an added token beyond the last is left out with a note. Raises ExportError for files that are missing, contradict
    each other or do not fit the runtime's byte-rank BPE, BundleError for a damaged file, and ModelError if something
    else than a file has its name; each names the file.
    """
    config = {} if path.is_file() else _optional_object(path / File.TOKENIZER_CONFIG)
    tokenizer_path = path if path.is_file() else path / File.TOKENIZER
    settings = _optional_object(tokenizer_path)
    vocab, merges, texts, source = _read_base(path, settings, tokenizer_path)
    if config.get("add_prefix_space"):
        raise ExportError(
            f"{path / File.TOKENIZER_CONFIG}: this tokenizer is not supported: add_prefix_space = "
            f"{shown(config['add_prefix_space'])} (accepted: false)"
        )
    joined = ["".join(pair) for pair in merges]
    stated = _with_added(path, vocab, _added_tokens(path, settings, config))
    declared = _declared(path, config)
    roles = token_roles(config, {} if path.is_file() else _optional_object(path / SPECIAL_TOKENS_MAP))
    numbered = number_tokens(declared, stated)
    whole = stated | numbered
    tokenizer = Tokenizer.from_vocab(whole, joined, source=source)
    _refuse_unlike(path, tokenizer, whole, merges)
    beyond = _beyond(tokenizer, whole, rows)
    if beyond:
        whole = {token: token_id for token, token_id in whole.items() if token not in beyond}
        numbered = {token: token_id for token, token_id in numbered.items() if token not in beyond}
        tokenizer = Tokenizer.from_vocab(whole, joined, source=source)
    if whole != vocab or File.VOCAB not in texts:
        texts[File.VOCAB] = json.dumps(whole, ensure_ascii=False)
    return TokenizerFiles(
        texts=texts,
        vocab=whole,
        tokenizer=tokenizer,
        numbered=numbered,
        roles={key: token for key, token in roles.items() if token in whole},
        tokenizer_json=read_text(tokenizer_path) if "model" in settings else None,
        notes=(*_number_notes(numbered, beyond, rows), *_notes(settings, config, declared)),
    )


def _read_base(
    path: Path, settings: Mapping[str, Any], tokenizer_path: Path
) -> tuple[dict[str, int], list[Pair], dict[str, str], str]:
    """Return the vocabulary, the merges, the bundle's text of what the folder has as text, and where they come from."""
    pair = None if path.is_file() else _find_pair(path)
    if pair is not None:
        vocab, merges, texts = _read_pair(*pair)
        if "model" in settings:
            _refuse_other(path, settings, vocab, merges)
        return vocab, merges, texts, f"{pair[0]} and {pair[1].name}"
    if path.is_file() and "model" not in settings:
        raise ExportError(
            f"{path} is a file, and not a whole tokenizer (accepted: a tokenizer.json of any name, or a folder)"
        )
    if not settings:
        raise _missing(path)
    vocab, merges = read_tokenizer_json(settings, tokenizer_path)
    texts = {File.MERGES: "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)])}
    return vocab, merges, texts, f"model.vocab and model.merges of {tokenizer_path}"


def _find_pair(folder: Path) -> tuple[Path, Path] | None:
    """Return the paths of the vocabulary and of the merges; None unless the folder has both."""
    found = [
        next((folder / name for name in names if file_is_there(folder / name)), None)
        for names in (VOCAB_NAMES, MERGES_NAMES)
    ]
    vocab, merges = found
    return None if vocab is None or merges is None else (vocab, merges)


def _missing(folder: Path) -> ExportError:
    """Return the error for a folder without a tokenizer, which says what lies there instead."""
    names = {path.name for path in folder.iterdir()}
    missing = [usual[0] for usual in (VOCAB_NAMES, MERGES_NAMES) if not names & {*usual}]
    others = "; ".join(describe_others(folder, names))
    if others:
        others = f" (found: {others}; a bundle runs a byte-level BPE only)"
    return ExportError(
        f"no {' and no '.join(missing)} in {folder}{others}; expected a GPT-2 tokenizer as {File.VOCAB} and "
        f"{File.MERGES}, or as {File.TOKENIZER}; if it is elsewhere, name its folder (--tokenizer FOLDER, tokenizer=)"
    )


def _read_pair(vocab_path: Path, merges_path: Path) -> tuple[dict[str, int], list[Pair], dict[str, str]]:
    vocab = read_vocab(vocab_path)
    merges_text = read_text(merges_path)
    merges = parse_merges(merges_text, source=str(merges_path))
    return vocab, merges, {File.VOCAB: read_text(vocab_path), File.MERGES: merges_text}


def _declared(path: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the special tokens that the files of a folder declare; a tokenizer in one file has no such files."""
    if path.is_file():
        return []
    class_name = config.get("tokenizer_class")
    if not class_name and file_is_there(path / File.CONFIG):
        class_name = read_config(path / File.CONFIG, "a Hugging Face folder of GPT-2 or GPT-1").get("tokenizer_class")
    try:
        return declared_tokens(config, _optional_object(path / SPECIAL_TOKENS_MAP), str(class_name or ""))
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from None


def _beyond(tokenizer: Tokenizer, vocab: Mapping[str, int], rows: int) -> dict[str, int]:
    """Return the added tokens whose ids a model of `rows` rows does not have; none if others lie there, too."""
    beyond = {token: token_id for token, token_id in vocab.items() if token_id >= rows}
    return beyond if {*beyond.values()} <= {*tokenizer.added_ids()} else {}


def _number_notes(numbered: Mapping[str, int], beyond: Mapping[str, int], rows: int) -> Iterator[str]:
    """Yield which special tokens got an id, and which tokens have no row in the model."""
    if numbered:
        ids = listed([f"{shown(token)} = {token_id}" for token, token_id in numbered.items()])
        yield f"special tokens that have no id in the files got the next free ones, as in `transformers`: {ids}"
    if beyond:
        ids = listed([f"{shown(token)} = {token_id}" for token, token_id in beyond.items()])
        yield (
            f"these tokens have no row in the model, which has {rows:,}, so they are left out, and are plain text in a "
            f"prompt: {ids}"
        )


def _optional_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if file_is_there(path) else {}


def _refuse_other(folder: Path, settings: Mapping[str, Any], vocab: Mapping[str, int], merges: Sequence[Pair]) -> None:
    """Raise ExportError if tokenizer.json, which `transformers` prefers, is another tokenizer than the two files."""
    other_vocab, other_merges = read_tokenizer_json(settings, folder / File.TOKENIZER)
    differing = [token for token, token_id in other_vocab.items() if vocab.get(token, token_id) != token_id]
    if differing or list(merges) != other_merges:
        first = f"the id of {shown(differing[0])} differs" if differing else "the merges differ"
        raise ExportError(
            f"{folder}: {File.TOKENIZER} is another tokenizer than {File.VOCAB} and {File.MERGES} ({first}); "
            "remove the one that the model was not trained with"
        )


def _added_tokens(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the tokens, with ids, that three files may add to the vocabulary. Raises ExportError."""
    added: list[tuple[Any, Any]] = list(_optional_object(folder / ADDED_TOKENS).items())
    entries = settings.get("added_tokens") or []
    entries = entries if isinstance(entries, list) else [entries]
    added += [(as_object(entry).get("content"), as_object(entry).get("id")) for entry in entries]
    for key, entry in as_object(config.get("added_tokens_decoder")).items():
        number = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key
        added.append((as_object(entry).get("content"), number))
    for token, token_id in added:
        if not (isinstance(token, str) and token and type(token_id) is int and 0 <= token_id < MAX_IDS):
            raise ExportError(
                f"{folder}: an added token is {shown(token)} with id {shown(token_id)} (accepted: a text and an "
                f"integer from 0 to {MAX_IDS - 1})"
            )
    return added


def _with_added(folder: Path, vocab: Mapping[str, int], added: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Return the vocabulary with the added tokens. Raises ExportError if an id or a text is already taken."""
    whole = dict(vocab)
    token_of = {token_id: token for token, token_id in vocab.items()}
    clashes = []
    for token, token_id in added:
        if whole.setdefault(token, token_id) != token_id or token_of.setdefault(token_id, token) != token:
            clashes.append(f"{shown(token)} = {token_id}")
    if clashes:
        raise ExportError(
            f"{folder}: added tokens that contradict {File.VOCAB} or each other: {listed(sorted(clashes))}"
        )
    return whole


def _refuse_unlike(folder: Path, tokenizer: Tokenizer, vocab: Mapping[str, int], merges: Sequence[Pair]) -> None:
    """Raise ExportError unless the runtime, which ranks joined bytes, splits text as these merges do."""
    longest = max((len(left) + len(right) for left, right in merges), default=0)
    letters = sum(len(left) + len(right) for left, right in merges)
    if longest > _MAX_LETTERS_IN_TOKEN or letters > _MAX_LETTERS:
        raise ExportError(
            f"{folder}: this tokenizer is not supported: its longest merge has {longest:,} letters, all have "
            f"{letters:,} (accepted: at most {_MAX_LETTERS_IN_TOKEN:,} and {_MAX_LETTERS:,})"
        )
    faults = [f"id {token_id} has no token" for token_id in itertools.islice(tokenizer.unused_ids(), 3)]
    joined = {left + right for left, right in merges}
    # These letters represent bytes beyond ASCII; an added token is plain text and has none of them.
    faults += [
        f"token {shown(text)} comes from no merge (is {File.MERGES} complete?)"
        for text in vocab
        if len(text) > 1 and text not in joined and any(0x100 <= ord(letter) < 0x144 for letter in text)
    ][:3]
    faults += [f"merge {shown(left)} {shown(right)} is never reached" for left, right in unreachable_merges(merges)[:3]]
    if faults:
        raise ExportError(f"{folder}: this tokenizer is not supported: {listed(faults)}")


def _notes(
    settings: Mapping[str, Any], config: Mapping[str, Any], declared: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield each setting by which `transformers` does more to a text than encode it."""
    processor = as_object(settings.get("post_processor"))
    steps = processor.get("processors") if processor.get("type") == "Sequence" else [processor]
    steps = [as_object(step) for step in steps] if isinstance(steps, list) else []
    adding = [
        step for step in steps if step.get("type") not in ("ByteLevel", None) and step.get("special_tokens") != {}
    ]
    if adding or config.get("add_bos_token"):
        yield (
            "the tokenizer of `transformers` puts special tokens around a text (post_processor, add_bos_token); ortgpt "
            "encodes the text alone"
        )
    entries = settings.get("added_tokens") or []
    entries = [*entries, *as_object(config.get("added_tokens_decoder")).values()] if isinstance(entries, list) else []
    known = [as_object(entry) for entry in entries]
    marked = [*known, *declared]
    flagged = {f"{shown(entry.get('content'))} ({flag})" for entry in marked for flag in _FLAGS if entry.get(flag)}
    if flagged:
        yield (
            f"in `transformers` these added tokens depend on the text beside them: {listed(sorted(flagged))}; in "
            "ortgpt they do not"
        )
    plain = {shown(entry.get("content")) for entry in known if entry.get("special") is False}
    if plain:
        yield (
            f"`transformers` recognises these added tokens in any text: {listed(sorted(plain))}; ortgpt encodes them "
            "as plain text unless special_tokens is set"
        )
