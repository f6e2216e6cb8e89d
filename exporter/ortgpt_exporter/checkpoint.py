"""From what a person names (a folder, or `austen`) to network, tokenizer files and provenance. Knows no ONNX."""

from __future__ import annotations

import importlib.resources
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.bundle import sha256_of
from ortgpt.contract import File
from ortgpt.errors import OptionError
from ortgpt.manifest import Source
from ortgpt.options import read_generation_config
from ortgpt.strict_json import read_json_object
from ortgpt.tokenizer import Tokenizer, read_merges, read_vocab
from ortgpt_exporter.errors import ExportError
from ortgpt_models import GPT, ModelError, load_gpt
from ortgpt_models.weights import CONFIG_FILE, WEIGHTS_FILE

BUNDLED = ("austen",)
_TOKENIZER_JSON = "tokenizer.json"
_ADDED_TOKENS_JSON = "added_tokens.json"
# Settings of a BPE in tokenizer.json that GPT-2 leaves off.
_BPE_VARIANTS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint: the float32 network, the text of its tokenizer files by name, and where it came from."""

    gpt: GPT
    tokenizer_files: Mapping[str, str]
    tokenizer_vocab_size: int
    generation_config: Mapping[str, Any]
    source: Source


def load_checkpoint(name: str | Path) -> Checkpoint:
    """Load a Hugging Face folder, or a model bundled with this package by its name (`austen`).

    A bundled name wins over a folder of that name (write ./austen for the folder). Raises ModelError for a network and
    ExportError for a tokenizer that is not supported.
    """
    folder = find_folder(name)
    gpt = load_gpt(folder)
    files = read_tokenizer_files(folder)
    tokenizer = load_tokenizer(folder, files)
    if gpt.config.vocab_size < tokenizer.vocab_size:
        raise ExportError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model only {gpt.config.vocab_size} rows; "
            "use the tokenizer that the model was trained with"
        )
    return Checkpoint(
        gpt=gpt,
        tokenizer_files=files,
        tokenizer_vocab_size=tokenizer.vocab_size,
        generation_config=_generation_config(folder, gpt, tokenizer.vocab_size),
        source=Source(
            id=name if isinstance(name, str) and name in BUNDLED else folder.resolve().name,
            sha256=sha256_of(folder / WEIGHTS_FILE),
            licence=_licence(folder),
        ),
    )


def find_folder(name: str | Path) -> Path:
    """Return the folder that `name` stands for. Raises ModelError when there is none."""
    if isinstance(name, str) and name in BUNDLED:
        return Path(str(importlib.resources.files("ortgpt_models"))) / "checkpoints" / name
    folder = Path(name)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {state}; expected a Hugging Face GPT-2 folder, or one of: {', '.join(BUNDLED)}")
    return folder


def read_tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the text of vocab.json and merges.txt, added tokens in the vocabulary; from tokenizer.json if need be.

    Raises ExportError when files are missing or of another kind, or an added token takes the id of another.
    """
    missing = [file for file in (File.VOCAB, File.MERGES) if not (folder / file).is_file()]
    if not missing:
        vocab = read_vocab(folder / File.VOCAB)
        read_merges(folder / File.MERGES)
        files = {file: (folder / file).read_text(encoding="utf-8") for file in (File.VOCAB, File.MERGES)}
    elif (folder / _TOKENIZER_JSON).is_file():
        vocab, merges = _read_tokenizer_json(folder / _TOKENIZER_JSON)
        files = {File.VOCAB: json.dumps(vocab, ensure_ascii=False), File.MERGES: merges}
    else:
        raise ExportError(
            f"no {' and no '.join(missing)} in {folder}; expected a GPT-2 tokenizer as {File.VOCAB} and {File.MERGES}, "
            f"or as {_TOKENIZER_JSON}"
        )
    token_of = {token_id: token for token, token_id in vocab.items()}
    new = {token: token_id for token, token_id in _added_tokens(folder).items() if vocab.get(token) != token_id}
    clashes = [f"{token!r} = {token_id}" for token, token_id in new.items() if token_id in token_of or token in vocab]
    if clashes:
        raise ExportError(f"{folder}: added tokens that contradict {File.VOCAB}: {', '.join(clashes)}")
    return files if not new else files | {File.VOCAB: json.dumps(vocab | new, ensure_ascii=False)}


def _read_tokenizer_json(path: Path) -> tuple[dict[str, int], str]:
    """Return the vocabulary and the text of the merges of a tokenizer.json.

    Raises ExportError unless it splits and joins text as GPT-2 does: a BPE on bytes, with nothing before or beside it.
    """
    values = read_json_object(path)
    model, splitter = (_object(values.get(key)) for key in ("model", "pre_tokenizer"))
    faults = [
        f"{name} = {found!r} (accepted: {wanted})"
        for name, found, good, wanted in (
            ("model.type", model.get("type"), model.get("type") == "BPE", "BPE"),
            ("normalizer", values.get("normalizer"), values.get("normalizer") is None, "null"),
            ("pre_tokenizer.type", splitter.get("type"), splitter.get("type") == "ByteLevel", "ByteLevel"),
            ("add_prefix_space", splitter.get("add_prefix_space"), not splitter.get("add_prefix_space"), "false"),
            ("use_regex", splitter.get("use_regex"), splitter.get("use_regex", True) is True, "true"),
            *((key, model.get(key), not model.get(key), "null") for key in _BPE_VARIANTS),
        )
        if not good
    ]
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        faults.append("model.vocab or model.merges is missing")
    if not isinstance(vocab, dict) or not isinstance(merges, list) or faults:
        raise ExportError(f"{path}: this tokenizer is not supported: {'; '.join(faults)}")
    lines = (" ".join(map(str, merge)) if isinstance(merge, list) else str(merge) for merge in merges)
    return vocab, "".join(f"{line}\n" for line in lines)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _added_tokens(folder: Path) -> dict[str, int]:
    """Return the tokens that added_tokens.json and tokenizer.json put beside the vocabulary, with their ids."""
    added: list[tuple[Any, Any]] = []
    if (folder / _ADDED_TOKENS_JSON).is_file():
        added += read_json_object(folder / _ADDED_TOKENS_JSON).items()
    if (folder / _TOKENIZER_JSON).is_file():
        entries = read_json_object(folder / _TOKENIZER_JSON).get("added_tokens") or []
        entries = entries if isinstance(entries, list) else [entries]
        added += [(_object(entry).get("content"), _object(entry).get("id")) for entry in entries]
    bad = [(token, token_id) for token, token_id in added if type(token) is not str or type(token_id) is not int]
    if bad:
        raise ExportError(
            f"{folder}: an added token is {bad[0][0]!r} with id {bad[0][1]!r}; expected a text and an integer"
        )
    return dict(added)


def load_tokenizer(folder: Path, files: Mapping[str, str]) -> Tokenizer:
    """Build the tokenizer as a bundle would have it, and make sure that it will split text as its merges say.

    Raises ExportError when it does not fit the runtime's byte-rank BPE, BundleError when its files are damaged.
    """
    with tempfile.TemporaryDirectory() as bundle:
        for name, text in files.items():
            (Path(bundle) / name).write_bytes(text.encode("utf-8", errors="surrogatepass"))  # the reader refuses them
        tokenizer = Tokenizer.load(Path(bundle))
        merges = read_merges(Path(bundle) / File.MERGES)
    faults = [f"id {token_id} has no token" for token_id in tokenizer.unused_ids()[:3]]
    made = {left + right for left, right in merges}
    # Letters that stand for bytes beyond ASCII: an added token is plain text and has none of them.
    unmade = [text for text in json.loads(files[File.VOCAB]) if len(text) > 1 and text not in made]
    faults += [
        f"token {text!r} is made by no merge (is {File.MERGES} complete?)"
        for text in unmade
        if any(0x100 <= ord(letter) < 0x144 for letter in text)
    ][:3]
    faults += [f"merge {left} {right} is never reached" for left, right in unreachable_merges(merges)[:3]]
    if faults:
        raise ExportError(f"{folder}: this tokenizer is not supported: {'; '.join(faults)}")
    return tokenizer


def unreachable_merges(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the merges that joining by the rank of the joined text does not reproduce from single letters.

    Pair-by-pair BPE ranks pairs, the runtime ranks what they join to. The two agree where the letters of each merged
    token, joined by the lower-ranked tokens only, come out as exactly the merge's two parts.
    """
    ranks: dict[str, int] = {}
    bad = []
    for rank, (left, right) in enumerate(merges):
        if left + right in ranks or _join(left + right, ranks) != [left, right]:
            bad.append((left, right))
        ranks.setdefault(left + right, rank)
    return bad


def _join(text: str, ranks: Mapping[str, int]) -> list[str]:
    parts = list(text)
    while len(parts) > 2:
        best, index = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1))
        if best == len(ranks):
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def _generation_config(folder: Path, gpt: GPT, vocab_size: int) -> dict[str, Any]:
    """Return the generation defaults. Raises ExportError for a value that the runtime would refuse."""
    special = {"bos_token_id": gpt.config.bos_token_id, "eos_token_id": gpt.config.eos_token_id}
    path = folder / File.GENERATION_CONFIG
    values = read_json_object(path) if path.is_file() else special
    try:
        eos = read_generation_config(values, ()).eos_token_id
    except OptionError as error:
        raise ExportError(f"{path}: {error}") from None
    ids = {*special.values(), *(eos if isinstance(eos, tuple) else ())} - {None}
    outside = sorted(token_id for token_id in ids if token_id >= vocab_size)
    if outside:
        raise ExportError(
            f"{folder}: bos_token_id or eos_token_id = {outside[0]} is not in the tokenizer (accepted: 0 to "
            f"{vocab_size - 1}, or null); correct it in {CONFIG_FILE} and {File.GENERATION_CONFIG}"
        )
    return values


def _licence(folder: Path) -> str | None:
    """Return the `license` of a model card's front matter, if the folder has one."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:[ \t]*[\"']?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
