"""What the commands read and write where a bundle has no tokenizer: token ids separated by white space."""

from __future__ import annotations

from typing import Any

from ortgpt.model import LoadedModel
from ortgpt.results import Completion, Piece
from ortgpt.text.ids_only import parse_ids


def as_prompt(model: LoadedModel, prompt: Any) -> Any:
    """Return a prompt as it is, or the ids that its text writes if the model has no tokenizer. Raises PromptError."""
    if model.has_text or not isinstance(prompt, str):
        return prompt
    return parse_ids(prompt, model.engine.allowed_vocab_size)


def written(model: LoadedModel, part: Completion | Piece, *, follows: bool) -> str:
    """Return what to write for a continuation or a piece of one; ids that follow others begin with a space."""
    if model.has_text:
        return part.text
    ids = " ".join(map(str, part.token_ids))
    return f" {ids}" if follows and ids else ids


def token_text(model: LoadedModel, token_id: int) -> str:
    """Return one token as a table of tokens shows it: its text in quotes, or its id."""
    return repr(model.tokenizer.decode([token_id])) if model.has_text else str(token_id)
