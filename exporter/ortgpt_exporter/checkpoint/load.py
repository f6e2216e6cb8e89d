"""From what a person names (folder, file, hub id, `austen`) to network, tokenizer and provenance. Knows no ONNX."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.folder import sha256_of
from ortgpt.bundle.manifest import Source
from ortgpt.contract import File
from ortgpt.errors import OptionError
from ortgpt.options.generation_config import read_generation_config
from ortgpt_exporter.checkpoint import hub
from ortgpt_exporter.checkpoint.tokenizer_files import TokenizerFiles, read_tokenizer
from ortgpt_exporter.errors import ExportError
from ortgpt_models import GPT, ModelError, load_gpt
from ortgpt_models.adapter import adapter_file, merge_adapter
from ortgpt_models.files import file_is_there
from ortgpt_models.hf_checkpoint import CONFIG_FILE, weight_files
from ortgpt_models.nanogpt import load_nanogpt

BUNDLED = ("austen",)
END_OF_TEXT = "<|endoftext|>"

_HUB_ID = "a hub id like openai-community/gpt2"
_ACCEPTED = {
    hub.CHECKPOINT: f"a Hugging Face folder, a nanoGPT ckpt.pt, {_HUB_ID}, or one of: {', '.join(BUNDLED)}",
    hub.TOKENIZER: f"a folder with the files of a tokenizer, {_HUB_ID}, or one of: {', '.join(BUNDLED)}",
    hub.ADAPTER: f"the folder of a PEFT adapter, or {_HUB_ID}",
}


@dataclass(frozen=True)
class CheckpointSource:
    """Say which checkpoint to load, and what to load with it."""

    name: str | Path
    """A Hugging Face folder, a nanoGPT checkpoint file, a hub id (owner/name) or `austen`; a path that exists wins."""
    _: KW_ONLY
    tokenizer: str | Path | None = None
    """A folder or hub id to take the tokenizer from (default: the checkpoint's own). A nanoGPT file needs it."""
    adapter: str | Path | None = None
    """A folder or hub id with a PEFT adapter to merge into the weights (needs the extra `lora`)."""
    revision: str | None = None
    """A branch, tag or commit hash of the hub id in `name` (default: its branch `main`)."""
    activation: str | None = None
    """The activation of a nanoGPT file, which does not state it: "gelu" (the default) or "gelu_new"."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint: the float32 network, its tokenizer, and where it came from.

    `notes` are facts worth telling the user, a line each.
    """

    gpt: GPT
    tokenizer_files: TokenizerFiles
    generation_config: Mapping[str, Any]
    source: Source
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """Where the files of something named are, and how its origin is recorded."""

    path: Path
    id: str
    commit: str | None = None
    notes: tuple[str, ...] = ()


def load_checkpoint(
    name: str | Path,
    *,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    activation: str | None = None,
    on_download: Callable[[hub.DownloadProgress], None] = lambda progress: None,
) -> Checkpoint:
    """Load a Hugging Face folder, a nanoGPT checkpoint file, a hub id (owner/name) or a bundled model (`austen`).

    A bundled name wins over a folder of that name (write ./austen for the folder), a path that exists over a hub id.
    `tokenizer` is a folder or hub id to take the tokenizer from, which a nanoGPT file needs; `adapter` one with a PEFT
    adapter to merge; `revision` a branch, tag or commit of the hub id; `activation` that of a nanoGPT file, which does
    not state it ("gelu" by default). The source's sha256 is of the file of weights, or, of several (an adapter's
    last), of their hexadecimal sha256s joined in order. Raises ModelError for a network
    or adapter, ExportError or BundleError for a tokenizer, that is not supported or damaged; ExportError for the hub.
    """
    place = _locate(name, hub.CHECKPOINT, on_download, revision)
    if place.path.is_file():
        _refuse_other_file(place.path, has_tokenizer=tokenizer is not None)
    elif activation is not None:
        raise ExportError(f"activation = {activation!r} is of a nanoGPT file; {name} states its own: leave it out")
    tokens = place if tokenizer is None else _locate(tokenizer, hub.TOKENIZER, on_download)
    change = None if adapter is None else _locate(adapter, hub.ADAPTER, on_download)
    gpt = (
        load_nanogpt(place.path, activation_function=activation or "gelu")
        if place.path.is_file()
        else load_gpt(place.path)
    )
    files = read_tokenizer(tokens.path)
    if gpt.config.vocab_size < files.tokenizer.vocab_size:
        raise ExportError(
            f"{tokens.path}: the tokenizer has {files.tokenizer.vocab_size} ids, the model only "
            f"{gpt.config.vocab_size} rows; use the tokenizer that the model was trained with"
        )
    if place.path.is_file():
        end = files.vocab.get(END_OF_TEXT)
        gpt.config = replace(gpt.config, bos_token_id=end, eos_token_id=end)
    weights = [place.path] if place.path.is_file() else weight_files(place.path)
    if change is not None:
        merge_adapter(gpt, change.path)
        weights.append(adapter_file(change.path))
    notes = (note for found in (place, tokens, change) if found for note in found.notes)
    return Checkpoint(
        gpt=gpt,
        tokenizer_files=files,
        generation_config=_generation_config(place.path, gpt, files.tokenizer.vocab_size),
        source=_source(place, change, weights),
        notes=tuple(dict.fromkeys((*notes, *_weight_notes(place, weights, gpt), *files.notes))),
    )


def find_folder(name: str | Path) -> Path:
    """Return the folder, or file, that `name` stands for on this machine. Raises ModelError when there is none."""
    if isinstance(name, str) and name in BUNDLED:
        return Path(str(importlib.resources.files("ortgpt_models"))) / "checkpoints" / name
    if not os.path.exists(name):
        raise ModelError(f"{str(name) or repr('')} does not exist (accepted: {_ACCEPTED[hub.CHECKPOINT]})")
    return Path(name)


def _locate(
    name: str | Path,
    part: hub.Part,
    on_download: Callable[[hub.DownloadProgress], None],
    revision: str | None = None,
) -> _Place:
    """Return where `part` of what `name` stands for is, after a download if need be."""
    bundled = isinstance(name, str) and name in BUNDLED
    if not bundled and not os.path.exists(name):
        if not (isinstance(name, str) and hub.looks_like_hub_id(name)):
            raise ModelError(f"{str(name) or repr('')} does not exist (accepted: {_ACCEPTED[part]})")
        snapshot = hub.download(name, revision=revision, part=part, on_progress=on_download)
        return _Place(snapshot.folder, name, snapshot.commit, snapshot.notes)
    if revision is not None:
        raise ExportError(f"revision = {revision!r} is of a hub id, and {name} is on this machine; leave it out")
    path = find_folder(name)
    if not path.is_dir() and not path.is_file():
        raise ModelError(f"{path} is neither a folder nor a file (accepted: {_ACCEPTED[part]})")
    if part is not hub.CHECKPOINT and not path.is_dir():
        raise ModelError(f"{path} is a file (accepted: {_ACCEPTED[part]})")
    whole = path.resolve()
    return _Place(path, str(name) if bundled else whole.name if path.is_dir() else f"{whole.parent.name}/{whole.name}")


def _refuse_other_file(path: Path, *, has_tokenizer: bool) -> None:
    """Raise ModelError for a file that is one of a Hugging Face folder, ExportError where a tokenizer is wanting."""
    if path.suffix in (".safetensors", ".json") or (path.suffix == ".bin" and (path.parent / CONFIG_FILE).exists()):
        raise ModelError(f"{path} is one file of a checkpoint; name its folder, {path.parent}")
    if not has_tokenizer:
        raise ExportError(
            f"{path} is a file, and a nanoGPT checkpoint carries no tokenizer; name the one it was trained with "
            "(--tokenizer): a folder, or for GPT-2's own openai-community/gpt2"
        )


def _source(place: _Place, change: _Place | None, weights: Sequence[Path]) -> Source:
    """Return the provenance; an adapter's is part of the id, since the weights are of both."""
    digests = [sha256_of(path) for path in weights]
    name, licences = place.id, [_licence(place.path)]
    if change is not None:
        name += f" + {change.id}" + (f"@{change.commit}" if change.commit else "")
        licences.append(_licence(change.path))
    return Source(
        id=name,
        revision=place.commit,
        sha256=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
        licence=" + ".join(dict.fromkeys(filter(None, licences))) or None,
    )


def _weight_notes(place: _Place, weights: Sequence[Path], gpt: GPT) -> list[str]:
    """Return what is worth telling of how the weights were read."""
    notes = []
    if place.path.is_file():
        notes.append(
            f"{place.path.name} was read with weights_only=True, and as it does not state its activation, with "
            f"{gpt.config.activation_function}"
        )
        weights = weights[1:]
    names = [path.name for path in weights if path.suffix != ".safetensors"]
    if names:
        where = "the folder" if place.commit is None else "the repository"
        notes.append(f"{where} has no safetensors; {', '.join(names)} was read with weights_only=True")
    return notes


def _generation_config(folder: Path, gpt: GPT, vocab_size: int) -> dict[str, Any]:
    """Return the generation defaults. Raises ExportError for a value that the runtime would refuse."""
    special = {"bos_token_id": gpt.config.bos_token_id, "eos_token_id": gpt.config.eos_token_id}
    path = folder / File.GENERATION_CONFIG
    values = read_json_object(path) if file_is_there(path) else special
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
    if not file_is_there(card):
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    found = re.search(r"^license:[ \t]*[\"']?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
