"""From what a person names (a folder, or `austen`) to network, tokenizer files and provenance. Knows no ONNX."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortgpt.bundle import sha256_of
from ortgpt.contract import File
from ortgpt.manifest import Source
from ortgpt.strict_json import read_json_object
from ortgpt.tokenizer import Tokenizer, read_merges
from ortgpt_exporter.errors import ExportError
from ortgpt_models import GPT, ModelError, load_gpt
from ortgpt_models.weights import WEIGHTS_FILE

BUNDLED = ("austen",)


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
    tokenizer = load_tokenizer(folder)
    if gpt.config.vocab_size < tokenizer.vocab_size:
        raise ExportError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model only {gpt.config.vocab_size} rows; "
            "use the tokenizer that the model was trained with"
        )
    return Checkpoint(
        gpt=gpt,
        tokenizer_files={file: (folder / file).read_text(encoding="utf-8") for file in (File.VOCAB, File.MERGES)},
        tokenizer_vocab_size=tokenizer.vocab_size,
        generation_config=_generation_config(folder, gpt),
        source=Source(
            id=str(name) if str(name) in BUNDLED else folder.resolve().name,
            sha256=sha256_of(folder / WEIGHTS_FILE),
            licence=_licence(folder),
        ),
    )


def find_folder(name: str | Path) -> Path:
    """Return the folder that `name` stands for. Raises ModelError when there is none."""
    if str(name) in BUNDLED:
        return Path(str(importlib.resources.files("ortgpt_models"))) / "checkpoints" / str(name)
    folder = Path(name)
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {state}; expected a Hugging Face GPT-2 folder, or one of: {', '.join(BUNDLED)}")
    return folder


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint and make sure that the runtime will split text as its merges say.

    Raises ExportError when it does not fit the runtime's byte-rank BPE, BundleError when its files are damaged.
    """
    for file in (File.VOCAB, File.MERGES):
        if not (folder / file).is_file():
            raise ExportError(f"no {file} in {folder}; expected a GPT-2 tokenizer as {File.VOCAB} and {File.MERGES}")
    tokenizer = Tokenizer.load(folder)
    faults = [f"id {token_id} has no token" for token_id in tokenizer.unused_ids()[:3]]
    merges = read_merges(folder / File.MERGES)
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


def _generation_config(folder: Path, gpt: GPT) -> dict[str, Any]:
    path = folder / File.GENERATION_CONFIG
    if path.is_file():
        return read_json_object(path)
    return {"bos_token_id": gpt.config.bos_token_id, "eos_token_id": gpt.config.eos_token_id}


def _licence(folder: Path) -> str | None:
    """Return the `license` of a model card's front matter, if the folder has one."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL)
    found = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
