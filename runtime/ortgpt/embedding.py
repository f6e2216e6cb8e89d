"""Embed texts: the hidden states that the head would turn into logits, of each text or each token. Knows no graph.

Texts of similar lengths are computed together, padded on the right. Logits are not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ortgpt.contract import Flavour
from ortgpt.decode.next_token import check_finite
from ortgpt.engine.engine import CPU_BATCH_TOKENS, Engine
from ortgpt.engine.forward import HiddenStates
from ortgpt.errors import BundleError, ContextLengthError, OptionError, PromptError, shown
from ortgpt.model import LoadedModel, Prompt
from ortgpt.options.validation import integer

Embeddings = npt.NDArray[np.float32]

_POOLINGS = ("last", "mean", "none")
_BATCH_BYTES = 2**28  # of caches, activations and hidden states that are computed together
_ACTIVATIONS = 16  # a token's numbers that are in memory at once, in units of n_embd: residual, query to value, MLP


def embed(
    model: LoadedModel, texts: Iterable[Prompt], pooling: str, normalize: bool, batch_tokens: int | None
) -> Embeddings | list[Embeddings]:
    """Do as Generator.embed() describes."""
    if pooling not in _POOLINGS:
        raise OptionError.bad_value("pooling", pooling, ", ".join(_POOLINGS))
    if not isinstance(normalize, bool):
        raise OptionError.bad_value("normalize", normalize, "True, False")
    batch_tokens = integer(1).read("batch_tokens", batch_tokens)
    engine = model.engine
    if not engine.has_hidden_states:
        raise BundleError(_without_hidden_states(model))
    all_ids = _read_texts(model, texts)
    per_token: dict[int, Embeddings] = {}
    per_text = np.empty((len(all_ids), engine.config.n_embd), np.float32)
    for index, hidden in _hidden_states(engine, all_ids, pooling != "last", batch_tokens):
        if pooling == "none":
            per_token[index] = _normalized(hidden) if normalize else hidden.copy()
        else:
            per_text[index] = hidden.mean(axis=0, dtype=np.float64)  # of the last token alone, or of all
    if pooling == "none":
        return [per_token[index] for index in range(len(all_ids))]
    return _normalized(per_text) if normalize else per_text


def _read_texts(model: LoadedModel, texts: Iterable[Prompt]) -> list[list[int]]:
    """Return the ids of each text. Raises PromptError or ContextLengthError, which name the text."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise PromptError(f"texts = {shown(texts)} (accepted: a list of texts or token ids; for one text, [text])")
    n_positions, all_ids = model.engine.config.n_positions, []
    for place, text in enumerate(texts):
        ids = model.prompt_ids(text, f"texts[{place}]")
        if not ids:
            raise PromptError(f"texts[{place}] is empty (accepted: at least one token)")
        if len(ids) > n_positions:
            raise ContextLengthError(
                f"texts[{place}] has {len(ids)} tokens, and the context is {n_positions} tokens; split or shorten it"
            )
        all_ids.append(ids)
    return all_ids


def _without_hidden_states(model: LoadedModel) -> str:
    if model.engine.session.graph.flavour == Flavour.PORTABLE:
        return f"{model.bundle.path} is portable, and only native bundles have hidden states; export a native one"
    return f"{model.bundle.path} has no hidden states, since an earlier version exported it; export it again"


def _normalized(vectors: Embeddings) -> Embeddings:
    """Return vectors (count, n_embd) with the length 1; zeros stay zeros."""
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    normalized: Embeddings = (vectors / np.where(lengths, lengths, 1)).astype(np.float32)
    return normalized


def _hidden_states(
    engine: Engine, all_ids: Sequence[list[int]], all_tokens: bool, batch_tokens: int | None
) -> Iterator[tuple[int, HiddenStates]]:
    """Yield the index of each text and its hidden states, (tokens or 1, n_embd), valid until the next one."""
    for batch in _batches(engine, all_ids, all_tokens, batch_tokens):
        prompts = [all_ids[index] for index in batch]
        last = np.array([[len(ids) - 1] for ids in prompts])
        positions = np.minimum(np.arange(last.max() + 1), last) if all_tokens else last
        hidden = engine.hidden_states(prompts, positions)
        for row, index in enumerate(batch):
            own = hidden[row, : len(all_ids[index]) if all_tokens else 1]
            check_finite(own, f"in texts[{index}]", name="numbers of hidden states")
            yield index, own


def _batches(
    engine: Engine, all_ids: Sequence[list[int]], all_tokens: bool, batch_tokens: int | None
) -> Iterator[list[int]]:
    """Split texts into batches of similar lengths that fit the budget, and that one graph computes."""
    limit = batch_tokens or (CPU_BATCH_TOKENS if engine.session.device.is_cpu else None)
    batch: list[int] = []
    for index in sorted(range(len(all_ids)), key=lambda each: len(all_ids[each])):
        count, longest = len(batch) + 1, len(all_ids[index])
        is_full = limit is not None and count * longest > limit
        if batch_tokens is None:
            is_full = is_full or count * _row_bytes(engine, longest, all_tokens) > _BATCH_BYTES
        if batch and (is_full or not engine.takes_at_once([all_ids[batch[0]], all_ids[index]])):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _row_bytes(engine: Engine, length: int, all_tokens: bool) -> int:
    """Return about how many bytes a row takes: its cache, activations, attention weights and hidden states."""
    config = engine.config
    numbers = length * config.n_embd * (_ACTIVATIONS + all_tokens) + config.n_head * length**2
    return length * engine.kv_shape.token_bytes + 4 * numbers
