"""Give a tokenizer the special tokens of a task, and write it as `transformers` reads it. Knows no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from ortgpt.bundle.manifest import PairTemplate, Template
from ortgpt.contract import File, FineTuning
from ortgpt.errors import shown
from ortgpt_exporter.checkpoint.tokenizer_folder import PLAIN_CLASSES, TokenizerFiles
from ortgpt_exporter.errors import ExportError

START, DELIMITER, EXTRACT = "<|start|>", "<|delimiter|>", "<|extract|>"


@dataclass(frozen=True, kw_only=True)
class TaskTokenizer:
    """A tokenizer whose template puts the task's tokens around and between texts."""

    tokenizer: Tokenizer
    """The tokenizer with them."""
    template: Template
    """The same, for the manifest of a bundle."""
    start: str
    """The token that begins a row."""
    start_id: int
    """Its id."""
    new_ids: tuple[int, ...]
    """The ids of the tokens that the tokenizer did not have."""

    def write(self, folder: Path, files: TokenizerFiles, n_positions: int) -> None:
        """Write tokenizer.json and tokenizer_config.json. Raises OSError."""
        values: dict[str, object] = {
            "tokenizer_class": PLAIN_CLASSES[1],
            "model_max_length": n_positions,
            "padding_side": "right",
            "split_special_tokens": True,  # their names in a text are plain text, as in the training
            **files.roles,
            "bos_token": self.start,
            "pad_token": self.start,
        }
        for name, text in (
            (File.TOKENIZER, str(self.tokenizer.to_str())),
            (File.TOKENIZER_CONFIG, json.dumps(values, indent=2, ensure_ascii=False) + "\n"),
        ):
            (folder / name).write_text(text, encoding="utf-8", newline="\n")


def task_tokenizer(task: str, files: TokenizerFiles, text: str, bos_token_id: int | None) -> TaskTokenizer:
    """Return the tokenizer in `text`, a tokenizer.json, with the tokens of a task.

    A row begins with the model's own start token, or else with a new one; it ends with a token whose hidden state gives
    the label; where the task has pairs, a third stands between the two. Raises ExportError where they cannot be added.
    """
    tokenizer = Tokenizer.from_str(text)
    token_of = {token_id: token for token, token_id in files.vocab.items()}
    own = token_of.get(-1 if bos_token_id is None else bos_token_id)
    start = START if own is None else own
    names = [start, *([] if task == FineTuning.CLASSIFICATION else [DELIMITER]), EXTRACT]
    ids = _add(tokenizer, names, files)
    around, between = (ids[0], ids[-1]), ids[1:-1]
    pair = f"{start} $A {DELIMITER} $B {EXTRACT}" if between else "$A $B"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {EXTRACT}", pair=pair, special_tokens=[*zip(names, ids, strict=True)]
    )
    before, after = around[:1], around[1:]
    of_pair = PairTemplate(before=before, between=tuple(between), after=after) if between else None
    return TaskTokenizer(
        tokenizer=tokenizer,
        template=Template(before=before, after=after, pair=of_pair),
        start=start,
        start_id=ids[0],
        new_ids=tuple(token_id for token_id in ids if token_id not in token_of),
    )


def _add(tokenizer: Tokenizer, names: Sequence[str], files: TokenizerFiles) -> list[int]:
    """Add special tokens that are missing; return the ids of all. Raises ExportError for one that a text could give."""
    added = {*files.tokenizer.added_ids()}
    plain = [name for name in names[1:] if files.vocab.get(name, -1) not in (-1, *added)]
    if plain:
        raise ExportError(
            f"the tokenizer has {shown(plain[0])} as a plain token, which this task needs as a special one"
        )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    ids = [numbers[name] for name in names]
    taken = [token_id for name, token_id in zip(names, ids, strict=True) if name not in files.vocab]
    if {*taken} & {*files.vocab.values()}:
        raise ExportError(f"the vocabulary has holes, so new tokens got ids that others have: {taken}")
    return ids
