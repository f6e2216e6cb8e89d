"""Read the tokenizer files of a checkpoint, in any form that Hugging Face folders have, and give those of a bundle.

A tokenizer that the runtime cannot reproduce token for token is refused, with the reason. Knows no network and no hub.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.files import read_text
from ortgpt.contract import File
from ortgpt.errors import listed, shown
from ortgpt.text.bpe_files import MAX_IDS, check_ids, parse_merges, read_merges_text, read_vocab
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_models.files import file_is_there

ADDED_TOKENS_JSON = "added_tokens.json"

# Settings of a BPE in tokenizer.json that GPT-2 does not use.
_BPE_VARIANTS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
# GPT-2's split as `tokenizers` and GPT-2's own encoder.py write it, and as tiktoken writes it.
_PATTERNS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
_SPLITTERS = "ByteLevel, or a Sequence of Split by GPT-2's pattern and ByteLevel with use_regex = false"
# Flags of an added token that depend on the text beside it.
_FLAGS = ("lstrip", "rstrip", "single_word")
# Far more than any tokenizer has; checking the merges takes about 3 microseconds a letter.
_MAX_LETTERS_IN_TOKEN = 2**14
_MAX_LETTERS = 2**22

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer that the runtime reproduces."""

    texts: Mapping[str, str]
    """The text of each tokenizer file of the bundle, by the file's name."""
    vocab: Mapping[str, int]
    """The id of every token, of added tokens too; each byte of a token is one of GPT-2's 256 letters."""
    tokenizer: Tokenizer
    """The tokenizer as the runtime runs it."""
    tokenizer_json: str | None = None
    """The folder's own tokenizer.json, if that is a whole tokenizer."""
    notes: tuple[str, ...] = ()
    """Facts to tell the user, one line each."""


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read vocab.json and merges.txt, or else tokenizer.json, and the tokens that other files add to them.

    Raises ExportError for files that are missing, contradict each other or do not fit the runtime's byte-rank BPE,
    BundleError for a damaged file, and ModelError if something else than a file has its name; each names the file.
    """
    settings, config = (_optional_object(folder / name) for name in (File.TOKENIZER, File.TOKENIZER_CONFIG))
    missing = [file for file in (File.VOCAB, File.MERGES) if not file_is_there(folder / file)]
    if not missing:
        vocab, merges, texts = _read_pair(folder)
        source = f"{folder / File.VOCAB} and {File.MERGES}"
        if "model" in settings:
            _refuse_other(folder, settings, vocab, merges)
    elif settings:
        vocab, merges = _read_tokenizer_json(settings, folder / File.TOKENIZER)
        texts = {File.MERGES: "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in merges)])}
        source = f"model.vocab and model.merges of {folder / File.TOKENIZER}"
    else:
        raise ExportError(
            f"no {' and no '.join(missing)} in {folder}; expected a GPT-2 tokenizer as {File.VOCAB} and {File.MERGES}, "
            f"or as {File.TOKENIZER}; if it is elsewhere, name its folder (--tokenizer FOLDER, tokenizer=)"
        )
    if config.get("add_prefix_space"):
        raise ExportError(
            f"{folder / File.TOKENIZER_CONFIG}: this tokenizer is not supported: add_prefix_space = "
            f"{shown(config['add_prefix_space'])} (accepted: false)"
        )
    added = _added_tokens(folder, settings, config)
    whole = _with_added(folder, vocab, added)
    if len(whole) > len(vocab) or File.VOCAB not in texts:
        texts[File.VOCAB] = json.dumps(whole, ensure_ascii=False)
    tokenizer = Tokenizer.from_vocab(whole, ["".join(pair) for pair in merges], source=source)
    _refuse_unlike(folder, tokenizer, whole, merges)
    own = read_text(folder / File.TOKENIZER) if "model" in settings else None
    notes = tuple(_notes(settings, config))
    return TokenizerFiles(texts=texts, vocab=whole, tokenizer=tokenizer, tokenizer_json=own, notes=notes)


def _read_pair(folder: Path) -> tuple[dict[str, int], list[Pair], dict[str, str]]:
    vocab = read_vocab(folder / File.VOCAB)
    merges_text = read_merges_text(folder / File.MERGES)
    merges = parse_merges(merges_text, source=str(folder / File.MERGES))
    vocab_text = read_text(folder / File.VOCAB)
    return vocab, merges, {File.VOCAB: vocab_text, File.MERGES: merges_text}


def _optional_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if file_is_there(path) else {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_tokenizer_json(settings: Mapping[str, Any], path: Path) -> tuple[dict[str, int], list[Pair]]:
    """Return the vocabulary and the merges of a tokenizer.json.

    Raises ExportError unless it splits and joins text as GPT-2 does: a BPE on bytes, without a normaliser.
    """
    model = _object(settings.get("model"))
    vocab, merges = model.get("vocab"), model.get("merges")
    faults = [
        f"{name} = {shown(value)} (accepted: {accepted})"
        for name, value, good, accepted in (
            ("model.type", model.get("type"), model.get("type") in ("BPE", None), "BPE"),  # old files state none
            ("normalizer", settings.get("normalizer"), settings.get("normalizer") is None, "null"),
            *((f"model.{key}", model.get(key), not model.get(key), "null") for key in _BPE_VARIANTS),
        )
        if not good
    ]
    faults += _splitter_faults(settings.get("pre_tokenizer"))
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        faults.append("model.vocab or model.merges is missing")
    if faults or not isinstance(vocab, dict) or not isinstance(merges, list):
        raise ExportError(f"{path}: this tokenizer is not supported: {listed(faults)}")
    pairs: list[Pair] = []
    for index, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise ExportError(f"{path}: model.merges[{index}] = {shown(merge)} (accepted: two tokens)")
        pairs.append((parts[0], parts[1]))
    return check_ids(vocab, source=f"model.vocab of {path}"), pairs


def _splitter_faults(splitter: Any) -> Iterator[str]:
    """Yield each setting of a pre_tokenizer that splits text otherwise than GPT-2."""
    outer = _object(splitter)
    steps = outer.get("pretokenizers") if outer.get("type") == "Sequence" else [splitter]
    steps = [_object(step) for step in steps] if isinstance(steps, list) else []
    kinds = [step.get("type") for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        value = shown(kinds[0]) if len(kinds) == 1 else f"a Sequence of {shown(kinds)}"
        yield f"pre_tokenizer = {value} (accepted: {_SPLITTERS})"
        return
    split, letters = steps[0], steps[-1]
    uses_regex = letters.get("use_regex", True)
    if uses_regex is not (len(steps) == 1):
        yield f"pre_tokenizer: use_regex = {shown(uses_regex)} (accepted: {str(len(steps) == 1).lower()})"
    if letters.get("add_prefix_space"):
        yield f"pre_tokenizer: add_prefix_space = {shown(letters['add_prefix_space'])} (accepted: false)"
    if len(steps) == 2:
        pattern = _object(split.get("pattern")).get("Regex")
        if pattern not in _PATTERNS:
            yield f"pre_tokenizer splits by {split.get('pattern')!r:.300} (accepted: GPT-2's pattern {_PATTERNS[0]})"
        mode = (split.get("behavior"), bool(split.get("invert")))
        if mode not in (("Isolated", False), ("Removed", True)):  # both keep each match of the pattern, and no more
            yield f"pre_tokenizer: behavior and invert = {shown(mode)} (accepted: Isolated and false)"


def _refuse_other(folder: Path, settings: Mapping[str, Any], vocab: Mapping[str, int], merges: Sequence[Pair]) -> None:
    """Raise ExportError if tokenizer.json, which `transformers` prefers, is another tokenizer than the two files."""
    other_vocab, other_merges = _read_tokenizer_json(settings, folder / File.TOKENIZER)
    differing = [token for token, token_id in other_vocab.items() if vocab.get(token, token_id) != token_id]
    if differing or list(merges) != other_merges:
        first = f"the id of {shown(differing[0])} differs" if differing else "the merges differ"
        raise ExportError(
            f"{folder}: {File.TOKENIZER} is another tokenizer than {File.VOCAB} and {File.MERGES} ({first}); "
            "remove the one that the model was not trained with"
        )


def _added_tokens(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the tokens, with ids, that three files may add to the vocabulary. Raises ExportError."""
    added: list[tuple[Any, Any]] = list(_optional_object(folder / ADDED_TOKENS_JSON).items())
    entries = settings.get("added_tokens") or []
    entries = entries if isinstance(entries, list) else [entries]
    added += [(_object(entry).get("content"), _object(entry).get("id")) for entry in entries]
    for key, entry in _object(config.get("added_tokens_decoder")).items():
        number = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key
        added.append((_object(entry).get("content"), number))
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


def unreachable_merges(merges: Sequence[Pair]) -> list[Pair]:
    """Return the merges that joining by the rank of the joined text does not reproduce from single letters.

    BPE ranks pairs, the runtime ranks the tokens that they join to. The two agree if the letters of each merged token,
    joined by the lower-ranked tokens only, give exactly the two parts of the merge.
    """
    ranks: dict[str, int] = {}
    bad = []
    for rank, (left, right) in enumerate(merges):
        if left + right in ranks or _join(left + right, ranks) != [left, right]:
            bad.append((left, right))
        ranks.setdefault(left + right, rank)
    return bad


def _join(text: str, ranks: Mapping[str, int]) -> list[str]:
    """Join the letters of `text` by rank, the leftmost first among equals, until two parts are left or none fits."""
    size = len(text)
    end_of = list(range(1, size + 1))  # the end of the part that starts at this letter; 0 if none does
    before = list(range(-1, size - 1))  # the start of the part before it
    waiting: list[tuple[int, int, int]] = []  # rank, start and end of two neighbours that can be joined

    def offer(start: int, end: int) -> None:
        rank = ranks.get(text[start:end])
        if rank is not None:
            heapq.heappush(waiting, (rank, start, end))

    for start in range(size - 1):
        offer(start, start + 2)
    count = size
    while waiting and count > 2:
        _, start, end = heapq.heappop(waiting)
        middle = end_of[start]
        if not 0 < middle < end or end_of[middle] != end:
            continue  # one of the two was joined to another part meanwhile
        end_of[start], end_of[middle] = end, 0
        count -= 1
        if end < size:
            before[end] = start
            offer(start, end_of[end])
        if start:
            offer(before[start], end)
    starts = [start for start in range(size) if end_of[start]]
    return [text[start : end_of[start]] for start in starts]


def _notes(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield each setting by which `transformers` does more to a text than encode it."""
    processor = _object(settings.get("post_processor"))
    steps = processor.get("processors") if processor.get("type") == "Sequence" else [processor]
    steps = [_object(step) for step in steps] if isinstance(steps, list) else []
    adding = [
        step for step in steps if step.get("type") not in ("ByteLevel", None) and step.get("special_tokens") != {}
    ]
    if adding or config.get("add_bos_token"):
        yield (
            "the tokenizer of `transformers` puts special tokens around a text (post_processor, add_bos_token); ortgpt "
            "encodes the text alone"
        )
    entries = settings.get("added_tokens") or []
    entries = [*entries, *_object(config.get("added_tokens_decoder")).values()] if isinstance(entries, list) else []
    known = [_object(entry) for entry in entries]
    flagged = {f"{shown(entry.get('content'))} ({flag})" for entry in known for flag in _FLAGS if entry.get(flag)}
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
