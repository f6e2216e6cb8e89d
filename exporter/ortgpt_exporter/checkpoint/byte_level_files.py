"""Read the vocabulary and the merges of GPT-2's kind of tokenizer, and give the two files of a bundle.

A pair of files that the runtime cannot reproduce token for token is refused, with the reason. Knows no network.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.bundle.files import read_text
from ortgpt.contract import File, TokenizerKind
from ortgpt.errors import listed, shown
from ortgpt.text.bpe_files import parse_merges, read_vocab
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt_exporter.checkpoint.merge_check import Pair
from ortgpt_exporter.checkpoint.special_tokens import number_tokens
from ortgpt_exporter.checkpoint.tokenizer_folder import (
    TokenizerFiles,
    TokenizerFolder,
    number_notes,
    surrounding_notes,
)
from ortgpt_exporter.checkpoint.tokenizer_json import other_than_gpt2, read_bpe
from ortgpt_exporter.checkpoint.tokenizer_names import MERGES_NAMES, VOCAB_NAMES, WORDPIECE_VOCAB, describe_others
from ortgpt_exporter.errors import ExportError

# Flags of an added token that depend on the text beside it.
_FLAGS = ("lstrip", "rstrip", "single_word")
# Far more than any tokenizer has; checking the merges takes about 3 microseconds a letter.
_MAX_LETTERS_IN_TOKEN = 2**14
_MAX_LETTERS = 2**22


@dataclass(frozen=True, kw_only=True)
class Base:
    """A vocabulary without added tokens, and its merges."""

    vocab: dict[str, int]
    merges: list[Pair]
    texts: dict[str, str]
    """The bundle's text of what the folder has as text, by the file's name."""
    source: str
    """Where they come from, for messages."""


def read_base(folder: TokenizerFolder) -> Base:
    """Read vocab.json and merges.txt, or those of a tokenizer.json. Raises ExportError or BundleError."""
    path = folder.path
    if folder.pair is not None:
        vocab_path, merges_path = folder.pair
        vocab, merges_text = read_vocab(vocab_path), read_text(merges_path)
        merges = parse_merges(merges_text, source=str(merges_path))
        if folder.has_json:
            refuse_other(folder)
        texts = {File.VOCAB: read_text(vocab_path), File.MERGES: merges_text}
        return Base(vocab=vocab, merges=merges, texts=texts, source=f"{vocab_path} and {merges_path.name}")
    if folder.is_file and not folder.has_json:
        raise ExportError(
            f"{path} is a file, and not a whole tokenizer (accepted: a tokenizer.json of any name, or a folder)"
        )
    if not folder.settings:
        raise _missing(path)
    vocab, merges = read_bpe(folder.settings, folder.tokenizer_path)
    texts = {File.MERGES: "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)])}
    source = f"model.vocab and model.merges of {folder.tokenizer_path}"
    return Base(vocab=vocab, merges=merges, texts=texts, source=source)


def byte_level_files(folder: TokenizerFolder, base: Base, rows: int, *, is_built: bool) -> TokenizerFiles:
    """Return the files of a bundle, with the tokens that other files of the folder add.

    `is_built` says that tokenizer.json has settings that GPT2Tokenizer does not take. Raises ExportError for files that
    contradict each other or are cut short.
    """
    joined = ["".join(pair) for pair in base.merges]
    stated = _with_added(folder.path, base.vocab, [(entry["content"], each) for each, entry in folder.added_entries()])
    declared = folder.declared(folder.class_name)
    numbered = number_tokens(declared, stated)
    whole = stated | numbered
    tokenizer = ByteLevelBPE.from_vocab(whole, joined, source=base.source)
    _refuse_damaged(folder.path, tokenizer, whole, base.merges)
    beyond = _beyond(tokenizer, whole, rows)
    if beyond:
        whole = {token: token_id for token, token_id in whole.items() if token not in beyond}
        numbered = {token: token_id for token, token_id in numbered.items() if token not in beyond}
        tokenizer = ByteLevelBPE.from_vocab(whole, joined, source=base.source)
    texts = dict(base.texts)
    if whole != base.vocab or File.VOCAB not in texts:
        texts[File.VOCAB] = json.dumps(whole, ensure_ascii=False)
    return TokenizerFiles(
        kind=TokenizerKind.BYTE_LEVEL_BPE,
        texts=texts,
        vocab=whole,
        tokenizer=tokenizer,
        numbered=numbered,
        roles={key: token for key, token in folder.roles().items() if token in whole},
        tokenizer_json=read_text(folder.tokenizer_path) if folder.has_json and not is_built else None,
        notes=(
            *number_notes(numbered, beyond, rows),
            *(_built_notes(folder) if is_built else ()),
            *surrounding_notes(folder.settings, folder.config),
            *_notes(folder, declared),
        ),
    )


def _missing(folder: Path) -> ExportError:
    """Return the error for a folder without a tokenizer, which says what lies there instead."""
    names = {path.name for path in folder.iterdir()}
    missing = [usual[0] for usual in (VOCAB_NAMES, MERGES_NAMES) if not names & {*usual}]
    others = "; ".join(describe_others(folder, names))
    if others:
        others = f" (found: {others})"
    return ExportError(
        f"no {' and no '.join(missing)} in {folder}{others}; expected a GPT-2 tokenizer as {File.VOCAB} and "
        f"{File.MERGES}, any as {File.TOKENIZER}, or a {WORDPIECE_VOCAB}; if it is elsewhere, name its folder "
        "(--tokenizer FOLDER, tokenizer=), or give --tokenizer none for a bundle that takes and gives token ids"
    )


def _built_notes(folder: TokenizerFolder) -> Iterator[str]:
    """Yield which settings of tokenizer.json do not count for GPT-2's class, and how they would."""
    yield (
        f"GPT2Tokenizer of `transformers` takes only vocabulary and merges of {File.TOKENIZER}, and so does ortgpt; "
        f"left out: {listed(other_than_gpt2(folder.settings))}. If the model was trained with that, name the file "
        f"(--tokenizer {folder.tokenizer_path})"
    )


def _beyond(tokenizer: ByteLevelBPE, vocab: Mapping[str, int], rows: int) -> dict[str, int]:
    """Return the added tokens whose ids a model of `rows` rows does not have; none if others lie there, too."""
    beyond = {token: token_id for token, token_id in vocab.items() if token_id >= rows}
    return beyond if {*beyond.values()} <= {*tokenizer.added_ids()} else {}


def refuse_other(folder: TokenizerFolder) -> None:
    """Raise ExportError if tokenizer.json, which `transformers` prefers, is another tokenizer than the two files."""
    assert folder.pair is not None, "the caller saw the pair"
    vocab, merges = read_vocab(folder.pair[0]), parse_merges(read_text(folder.pair[1]), source=str(folder.pair[1]))
    other_vocab, other_merges = read_bpe(folder.settings, folder.tokenizer_path)
    differing = [token for token, token_id in other_vocab.items() if vocab.get(token, token_id) != token_id]
    if differing or merges != other_merges:
        first = f"the id of {shown(differing[0])} differs" if differing else "the merges differ"
        raise ExportError(
            f"{folder.path}: {File.TOKENIZER} is another tokenizer than {File.VOCAB} and {File.MERGES} ({first}); "
            "remove the one that the model was not trained with"
        )


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


def _refuse_damaged(folder: Path, tokenizer: ByteLevelBPE, vocab: Mapping[str, int], merges: Sequence[Pair]) -> None:
    """Raise ExportError for a vocabulary with holes, and for merges that are absurd or cut short."""
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
    if faults:
        raise ExportError(f"{folder}: this tokenizer is not supported: {listed(faults)}")


def _notes(folder: TokenizerFolder, declared: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each way in which `transformers` treats added tokens in a text otherwise."""
    known = [*folder.json_entries(), *(entry for _, entry in folder.config_entries())]
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
