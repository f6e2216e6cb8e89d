"""What a folder, or a single file, holds of a tokenizer, and which class of `transformers` reads it. Knows no bundle.

`transformers` 5 takes the class that tokenizer_config.json or config.json names, or else that of the model's type. A
class of its own rebuilds the tokenizer from the vocabulary and the merges, whatever else a tokenizer.json says; any
other name takes tokenizer.json as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.manifest import Template
from ortgpt.contract import File
from ortgpt.errors import listed, shown
from ortgpt.text.bpe_files import MAX_IDS
from ortgpt.text.tokenizer import Tokenizer
from ortgpt_exporter.checkpoint.special_tokens import SPECIAL_TOKENS_MAP, declared_tokens, token_roles
from ortgpt_exporter.checkpoint.tokenizer_json import as_object
from ortgpt_exporter.checkpoint.tokenizer_names import ADDED_TOKENS, MERGES_NAMES, VOCAB_NAMES, WORDPIECE_VOCAB
from ortgpt_exporter.errors import ExportError
from ortgpt_models.files import file_is_there
from ortgpt_models.files import read_json_object as read_config

GPT2_CLASS, GPT1_CLASS, BERT_CLASS = "GPT2Tokenizer", "OpenAIGPTTokenizer", "BertTokenizer"
# Classes that take a tokenizer.json as it is.
PLAIN_CLASSES = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "PythonBackend")
SURROUNDINGS = (
    "the tokenizer of `transformers` puts special tokens around a text (post_processor, add_bos_token); ortgpt encodes "
    "the text alone"
)
_CLASS_OF_TYPE = {"gpt2": GPT2_CLASS, "openai-gpt": GPT1_CLASS, "bert": BERT_CLASS}


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer that the runtime reproduces."""

    kind: str
    """What the manifest calls it, one of contract.TokenizerKind."""
    texts: Mapping[str, str]
    """The text of each tokenizer file of the bundle, by the file's name."""
    vocab: Mapping[str, int]
    """The id of every token, of added tokens too, as the files write it; empty without a tokenizer."""
    tokenizer: Tokenizer
    """The tokenizer as the runtime runs it."""
    numbered: Mapping[str, int] = field(default_factory=dict)
    """The special tokens among them that the files declare without an id, each with the id that it got."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The named special tokens that the files declare, by name: {"pad_token": "<|pad|>"}."""
    tokenizer_json: str | None = None
    """The folder's own tokenizer.json, if that is a whole tokenizer and this one."""
    template: Template | None = None
    """The tokens around the texts of a classifier, if there are any."""
    post_processor: Mapping[str, Any] | None = None
    """What puts them there in a tokenizer.json."""
    notes: tuple[str, ...] = ()
    """Facts to tell the user, one line each."""

    def with_notes(self, notes: Iterable[str]) -> TokenizerFiles:
        """Return the same with further notes."""
        return replace(self, notes=(*self.notes, *notes))


class TokenizerFolder:
    """The files of a tokenizer in a folder, or a file that holds what a tokenizer.json does."""

    def __init__(self, path: Path) -> None:
        """Read the JSON files. Raises BundleError for a damaged one, and ModelError if something else has its name."""
        self.path = path
        self.is_file = path.is_file()
        self.config = self._object(File.TOKENIZER_CONFIG)
        self.special_map = self._object(SPECIAL_TOKENS_MAP)
        self.tokenizer_path = path if self.is_file else path / File.TOKENIZER
        self.settings = read_json_object(path) if self.is_file else self._object(File.TOKENIZER)
        self.class_name = self._class_name()

    def _object(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_json_object(path) if not self.is_file and file_is_there(path) else {}

    def _class_name(self) -> str:
        """Return the class of `transformers` that reads the folder, without "Fast"; empty if nothing says it."""
        named = self.config.get("tokenizer_class")
        path = self.path / File.CONFIG
        if not named and not self.is_file and file_is_there(path):
            values = read_config(path, "a Hugging Face folder of GPT-2 or GPT-1")
            named = values.get("tokenizer_class") or _CLASS_OF_TYPE.get(str(values.get("model_type")))
        name = str(named or "")
        return name if name in PLAIN_CLASSES else name.removesuffix("Fast")

    @property
    def has_json(self) -> bool:
        """Whether there is a tokenizer.json that is a whole tokenizer."""
        return "model" in self.settings

    @cached_property
    def pair(self) -> tuple[Path, Path] | None:
        """The paths of the vocabulary and of the merges; None unless the folder has both."""
        if self.is_file:
            return None
        vocab, merges = (
            next((self.path / name for name in names if file_is_there(self.path / name)), None)
            for names in (VOCAB_NAMES, MERGES_NAMES)
        )
        return None if vocab is None or merges is None else (vocab, merges)

    @property
    def wordpiece_path(self) -> Path | None:
        """The path of a vocab.txt, if there is one."""
        path = self.path / WORDPIECE_VOCAB
        return path if not self.is_file and file_is_there(path) else None

    def added_entries(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the id and the settings of each token that three files add to the vocabulary.

        Raises ExportError for one that is no text, or has no id.
        """
        added: list[tuple[Any, dict[str, Any]]] = []
        added += [(number, {"content": token}) for token, number in self._object(ADDED_TOKENS).items()]
        added += [(entry.get("id"), entry) for entry in self.json_entries()]
        added += self.config_entries()
        for token_id, entry in added:
            token = entry.get("content")
            if not (isinstance(token, str) and token and type(token_id) is int and 0 <= token_id < MAX_IDS):
                raise ExportError(
                    f"{self.path}: an added token is {shown(token)} with id {shown(token_id)} (accepted: a text and an "
                    f"integer from 0 to {MAX_IDS - 1})"
                )
        return added

    def json_entries(self) -> list[dict[str, Any]]:
        """Return the added tokens of tokenizer.json as it states them."""
        entries = self.settings.get("added_tokens") or []
        return [as_object(entry) for entry in (entries if isinstance(entries, list) else [entries])]

    def config_entries(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return the id and the settings of the added tokens of tokenizer_config.json."""
        entries = as_object(self.config.get("added_tokens_decoder")).items()
        return [(int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key, as_object(entry))
                for key, entry in entries]  # fmt: skip

    def declared(self, class_name: str) -> list[dict[str, Any]]:
        """Return the special tokens that the folder declares, in order of their ids; a single file declares none.

        `class_name` is the class whose own special tokens count, too.
        """
        if self.is_file:
            return []
        try:
            return declared_tokens(self.config, self.special_map, class_name)
        except ExportError as error:
            raise ExportError(f"{self.path}: {error}") from None

    def roles(self, class_name: str | None = None) -> dict[str, str]:
        """Return the text of each named special token that the files declare, or else `class_name` has, by name."""
        return token_roles(self.config, self.special_map, class_name)


def number_notes(numbered: Mapping[str, int], beyond: Mapping[str, int], rows: int) -> Iterator[str]:
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


def adds_around(settings: Mapping[str, Any]) -> bool:
    """Tell whether a tokenizer.json puts special tokens around a text."""
    processor = as_object(settings.get("post_processor"))
    steps = processor.get("processors") if processor.get("type") == "Sequence" else [processor]
    steps = [as_object(step) for step in steps] if isinstance(steps, list) else []
    return any(step.get("type") not in ("ByteLevel", None) and step.get("special_tokens") != {} for step in steps)


def surrounding_notes(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield that `transformers` puts special tokens around a text, if it does."""
    if adds_around(settings) or config.get("add_bos_token"):
        yield SURROUNDINGS
