"""Load a checkpoint by its name (folder, file, hub id, `austen`): network, tokenizer, provenance. Knows no ONNX."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from ortgpt.bundle.folder import sha256_of
from ortgpt.bundle.manifest import Source
from ortgpt.errors import OptionError
from ortgpt.options.validation import integer, token_ids
from ortgpt_exporter.checkpoint import hub
from ortgpt_exporter.checkpoint.characters import CHARACTERS, read_characters
from ortgpt_exporter.checkpoint.generation_defaults import GenerationDefaults, read_generation_defaults
from ortgpt_exporter.checkpoint.lora import adapter_file, merge_adapter
from ortgpt_exporter.checkpoint.tokenizer_files import no_tokenizer, read_tokenizer
from ortgpt_exporter.checkpoint.tokenizer_folder import TokenizerFiles
from ortgpt_exporter.errors import ExportError
from ortgpt_models.classifier import GPTClassifier
from ortgpt_models.errors import ModelError
from ortgpt_models.files import file_is_there
from ortgpt_models.gpt import GPT
from ortgpt_models.hf_checkpoint import CONFIG_FILE, load_network, weight_files
from ortgpt_models.nanogpt import load_nanogpt
from ortgpt_models.progress import OnProgress

BUNDLED = ("austen",)
END_OF_TEXT = "<|endoftext|>"
NO_TOKENIZER = "none"
_PICKLE = Path(CHARACTERS).suffix

_HUB_ID = "a hub id like openai-community/gpt2"
_ACCEPTED = {
    hub.CHECKPOINT: f"a Hugging Face folder, a nanoGPT ckpt.pt, {_HUB_ID}, or one of: {', '.join(BUNDLED)}",
    hub.TOKENIZER: "a folder with the files of a tokenizer, a tokenizer.json of any name, a nanoGPT meta.pkl, "
    f"{_HUB_ID}, or one of: {', '.join((*BUNDLED, NO_TOKENIZER))}",
    hub.ADAPTER: f"the folder of a PEFT adapter, or {_HUB_ID}",
}


@dataclass(frozen=True)
class CheckpointSource:
    """Say which checkpoint to load, and what to load with it. Raises OptionError for a value of another kind."""

    name: str | Path
    """A Hugging Face folder, a nanoGPT file, a hub id (owner/name) or `austen`; a folder that exists wins."""
    _: KW_ONLY
    tokenizer: str | Path | None = None
    """A folder, a tokenizer.json of any name or a hub id to take the tokenizer from (default: the checkpoint's own), or
    "none" for a bundle that takes and gives token ids. A nanoGPT file needs it, unless its meta.pkl lies beside it."""
    adapter: str | Path | None = None
    """A folder or hub id with a PEFT adapter to merge into the weights (needs the extra `lora`)."""
    revision: str | None = None
    """A branch, tag or commit hash of the hub id in `name` (default: its branch `main`)."""
    activation: str | None = None
    """The activation of a nanoGPT file, which does not state it, by its name in `transformers` (default: "gelu")."""
    bos_token_id: int | None = None
    """The id of the token that begins a text, in place of the checkpoint's."""
    eos_token_id: int | Sequence[int] | None = None
    """The id of the token that ends a text, or several, in place of the checkpoint's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bos_token_id", integer(0).read("bos_token_id", self.bos_token_id))
        object.__setattr__(self, "eos_token_id", token_ids().read("eos_token_id", self.eos_token_id))
        for field in ("name", "tokenizer", "adapter"):
            value = getattr(self, field)
            if not isinstance(value, (str, os.PathLike)) and (field == "name" or value is not None):
                raise OptionError.bad_value(field, value, "a path, or a hub id")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    gpt: GPT
    """The network in float32, in evaluation mode."""
    tokenizer_files: TokenizerFiles
    """Its tokenizer."""
    generation_config: Mapping[str, Any]
    """The generation defaults: the values of generation_config.json, or else those of config.json; none for a
    classifier."""
    source: Source
    """Where the checkpoint came from, as the manifest records it."""
    classifier: GPTClassifier | None = None
    """The network with its head, if it is a classifier's; `gpt` is its body."""
    notes: tuple[str, ...] = ()
    """Facts to tell the user, one line each."""


@dataclass(frozen=True)
class _Place:
    """Where the files of a checkpoint, a tokenizer or an adapter are, and how the manifest names their origin."""

    path: Path
    id: str
    commit: str | None = None
    notes: tuple[str, ...] = ()


def load_checkpoint(source: CheckpointSource, *, on_progress: OnProgress = lambda progress: None) -> Checkpoint:
    """Load the network and the tokenizer that `source` names; download them first if need be.

    `on_progress` counts the bytes of each download. The sha256 in the result's `source` is that of the weight file; of
    several files (an adapter's is the last), it is the sha256 of their hexadecimal digests joined in order. Raises
    ExportError for a network, tokenizer or adapter that is not supported or is damaged, and for a failed download;
    BundleError for a damaged tokenizer file; ModuleNotFoundError naming `peft` for an adapter without that package.
    """
    try:
        return _load(source, on_progress)
    except ModelError as error:
        raise ExportError(str(error)) from error


def _load(source: CheckpointSource, on_progress: OnProgress) -> Checkpoint:
    if source.adapter is not None:
        import peft  # noqa: F401  # to fail before a download, not after it
    place = _locate(source.name, hub.CHECKPOINT, on_progress, source.revision)
    is_file = place.path.is_file()
    if is_file:
        has_characters = (place.path.parent / CHARACTERS).is_file()
        _refuse_other_file(place.path, has_tokenizer=source.tokenizer is not None or has_characters)
    elif source.activation is not None:
        raise ExportError(
            f"activation = {source.activation!r} is for a nanoGPT file; {source.name} states its own: leave it out"
        )
    tokens = place
    if source.tokenizer is not None and source.tokenizer != NO_TOKENIZER:
        tokens = _locate(source.tokenizer, hub.TOKENIZER, on_progress)
    elif is_file:  # its characters lie beside it
        tokens = replace(place, path=place.path.parent / CHARACTERS)
    adapter = None if source.adapter is None else _locate(source.adapter, hub.ADAPTER, on_progress)
    notes: list[str] = []
    classifier = None
    if is_file:
        gpt = load_nanogpt(place.path, activation_function=source.activation or "gelu", on_note=notes.append)
        weights = [place.path]
    else:
        network = load_network(place.path, on_note=notes.append)
        classifier = network if isinstance(network, GPTClassifier) else None
        gpt = network.gpt if isinstance(network, GPTClassifier) else network
        weights = weight_files(place.path)
    files = _tokenizer_files(source, tokens.path, gpt.config.vocab_size, surrounded=classifier is not None)
    if gpt.config.vocab_size < files.tokenizer.vocab_size:
        raise ExportError(
            f"{tokens.path}: the tokenizer has {files.tokenizer.vocab_size} ids, the model only "
            f"{gpt.config.vocab_size} rows; use the tokenizer that the model was trained with"
        )
    if classifier is not None:
        _refuse_for_classifier(source)
        return _classifier_checkpoint(classifier, files, place, tokens, notes)
    defaults = _defaults(place, source, gpt, files)
    gpt.config = replace(gpt.config, bos_token_id=defaults.bos_token_id, eos_token_id=defaults.eos_token_id)
    if adapter is not None:
        merge_adapter(gpt, adapter.path)
        weights.append(adapter_file(adapter.path))
    places = [note for each in (place, tokens, adapter) if each for note in each.notes]
    notes = [*places, *_weight_notes(place, weights, gpt), *notes]
    notes += [*files.notes, *_mask_notes(gpt, files), *defaults.notes]
    return Checkpoint(
        gpt=gpt,
        tokenizer_files=files,
        generation_config=defaults.values,
        source=_source(place, adapter, weights),
        notes=tuple(dict.fromkeys(notes)),
    )


def _refuse_for_classifier(source: CheckpointSource) -> None:
    """Raise ExportError for what a classifier cannot be loaded with."""
    if source.adapter is not None:
        raise ExportError(
            f"{source.name} is a classifier, and its head may be part of the adapter {source.adapter}; merge the two "
            "with peft (`model.merge_and_unload().save_pretrained(OUT)`), and export OUT"
        )
    named = {"bos_token_id": source.bos_token_id, "eos_token_id": source.eos_token_id}
    idle = [name for name, value in named.items() if value is not None]
    if idle:
        raise ExportError(f"{' and '.join(idle)} would have no effect: {source.name} is a classifier; leave it out")


def _classifier_checkpoint(
    classifier: GPTClassifier, files: TokenizerFiles, place: _Place, tokens: _Place, notes: list[str]
) -> Checkpoint:
    gpt, weights = classifier.gpt, weight_files(place.path)
    # Many classifiers of a small vocabulary state GPT-2's own ids; no text of a classifier begins or ends with one.
    bos, eos = (
        each if each is not None and each < files.tokenizer.vocab_size else None
        for each in (gpt.config.bos_token_id, gpt.config.eos_token_id)
    )
    gpt.config = replace(gpt.config, bos_token_id=bos, eos_token_id=eos)
    notes = [*place.notes, *tokens.notes, *_weight_notes(place, weights, gpt), *notes, *files.notes]
    return Checkpoint(
        gpt=gpt,
        tokenizer_files=files,
        generation_config={},
        source=_source(place, None, weights),
        classifier=classifier,
        notes=tuple(dict.fromkeys(notes)),
    )


def _tokenizer_files(source: CheckpointSource, path: Path, rows: int, *, surrounded: bool) -> TokenizerFiles:
    """Read the tokenizer at `path` for a model with `rows` rows, if `source` wants one."""
    if source.tokenizer == NO_TOKENIZER:
        return no_tokenizer(rows)
    if path.suffix == _PICKLE:
        return read_characters(path)
    return read_tokenizer(path, rows=rows, surrounded=surrounded)


def _defaults(place: _Place, source: CheckpointSource, gpt: GPT, files: TokenizerFiles) -> GenerationDefaults:
    """Return the generation defaults; a nanoGPT file, which has none, ends a text at the tokenizer's end-of-text."""
    special = {"bos_token_id": gpt.config.bos_token_id, "eos_token_id": gpt.config.eos_token_id}
    if place.path.is_file():
        # The id of a token that was only just numbered means nothing to a network that never saw it.
        special = dict.fromkeys(special, None if END_OF_TEXT in files.numbered else files.vocab.get(END_OF_TEXT))
    ends = source.eos_token_id
    return read_generation_defaults(
        place.path,
        special,
        files.tokenizer.vocab_size,
        bos_token_id=source.bos_token_id,
        eos_token_ids=ends if isinstance(ends, Sequence) else [] if ends is None else [ends],
    )


def find_folder(name: str | Path) -> Path:
    """Return the folder or file on this machine that `name` stands for: a path, or the checkpoint `austen`.

    Raises ExportError if there is none.
    """
    if os.path.isdir(name) or (os.path.exists(name) and name not in BUNDLED):
        return Path(name)
    if name in BUNDLED:
        folder = importlib.resources.files("ortgpt_models") / "checkpoints" / str(name)
        if folder.is_dir():
            return Path(str(folder))
        raise ExportError(
            f"the checkpoint {name} is not installed: take models/ortgpt_models/checkpoints/{name} from a clone or the "
            f"source distribution of this project and name that folder; `ortgpt generate {name}` needs no export"
        )
    raise ExportError(f"{str(name) or repr('')} does not exist (accepted: {_ACCEPTED[hub.CHECKPOINT]})")


def _locate(name: str | Path, part: hub.Part, on_progress: OnProgress, revision: str | None = None) -> _Place:
    """Return where the files of `part` that `name` stands for are; download them if `name` is a hub id."""
    if not os.path.exists(name) and name not in BUNDLED:
        if not (isinstance(name, str) and hub.looks_like_hub_id(name)):
            raise ExportError(f"{str(name) or repr('')} does not exist (accepted: {_ACCEPTED[part]})")
        snapshot = hub.download(name, revision=revision, part=part, on_progress=on_progress)
        return _Place(snapshot.folder, name, snapshot.commit, snapshot.notes)
    if revision is not None:
        raise ExportError(f"revision = {revision!r} is for a hub id, and {name} is on this machine; leave it out")
    path = find_folder(name)
    if not path.is_dir() and not path.is_file():
        raise ExportError(f"{path} is neither a folder nor a file (accepted: {_ACCEPTED[part]})")
    if not path.is_dir() and (part is hub.ADAPTER or (part is hub.TOKENIZER and path.suffix not in (".json", _PICKLE))):
        raise ExportError(f"{path} is a file (accepted: {_ACCEPTED[part]})")
    whole = path.resolve()
    return _Place(path, whole.name if path.is_dir() else f"{whole.parent.name}/{whole.name}")


def _refuse_other_file(path: Path, *, has_tokenizer: bool) -> None:
    """Raise ExportError for a file that belongs to a Hugging Face folder, or if no tokenizer was named for it."""
    if path.suffix in (".safetensors", ".json") or (path.suffix == ".bin" and (path.parent / CONFIG_FILE).exists()):
        raise ExportError(f"{path} is one file of a checkpoint; name its folder, {path.parent}")
    if not has_tokenizer:
        raise ExportError(
            f"{path} is a file, and a nanoGPT checkpoint carries no tokenizer; name the one it was trained with "
            f"(--tokenizer): a folder, its {CHARACTERS}, for GPT-2's own openai-community/gpt2, or none for a bundle "
            "of token ids"
        )


def _source(place: _Place, adapter: _Place | None, weights: Sequence[Path]) -> Source:
    """Return the provenance; an adapter is part of the id, since the merged weights come from both."""
    digests = [sha256_of(path) for path in weights]
    name, licences = place.id, [_licence(place.path)]
    if adapter is not None:
        name += f" + {adapter.id}" + (f"@{adapter.commit}" if adapter.commit else "")
        licences.append(_licence(adapter.path))
    return Source(
        id=name,
        revision=place.commit,
        sha256=digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
        licence=" + ".join(dict.fromkeys(filter(None, licences))) or None,
    )


def _weight_notes(place: _Place, weights: Sequence[Path], gpt: GPT) -> list[str]:
    """Return what to tell the user about how the weights were read."""
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


def _mask_notes(gpt: GPT, files: TokenizerFiles) -> list[str]:
    """Return how many rows of the model are masked, and why."""
    rows, ids = gpt.config.vocab_size, files.tokenizer.vocab_size
    if rows == ids:
        return []
    return [
        f"the model has {rows:,} rows and the tokenizer {ids:,} ids; the rows without a token, {rows - ids:,} from id "
        f"{ids} on, are never picked"
    ]


def _licence(folder: Path) -> str | None:
    """Return the `license` of a model card's front matter, if the folder has one."""
    card = folder / "README.md"
    if not file_is_there(card):
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8-sig", errors="replace"), re.DOTALL)
    licence = re.search(r"^license:[ \t]*[\"']?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    return licence[1] if licence else None
