"""The network of a fine-tuning: a language model with a new linear head, its losses and their measurement.

Computes a few examples at a time, so that the memory is bounded. Knows no text, no files and no optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortgpt_models.classifier import MULTIPLE_CHOICE, SIMILARITY
from ortgpt_models.finetune_config import FineTuneConfig
from ortgpt_models.gpt import GPT
from ortgpt_models.task_data import Example, TaskData

# Tokens that are computed at once. Their logits are what takes most memory: 400 MB for GPT-2's vocabulary, a few times
# over.
PART_TOKENS = 2048
_NEW_ROW_STD = 0.02  # of the embeddings of new tokens, as of GPT-1's


class FineTuned(nn.Module):
    """A language model with a linear head on the last token of a row."""

    def __init__(self, gpt: GPT, data: TaskData, head_dropout: float) -> None:
        """Draw the head from N(0, 0.02²)."""
        super().__init__()
        self.gpt = gpt
        self.task = data.task
        self.has_classes = data.has_classes
        self.drop = nn.Dropout(head_dropout)
        self.score = nn.Linear(gpt.config.n_embd, len(data.labels), bias=False)
        nn.init.normal_(self.score.weight, std=_NEW_ROW_STD)

    def losses(self, examples: Sequence[Example], *, with_language: bool) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of the task, and of the language model if wanted.

        The latter is the mean over rows of a row's mean over its tokens, from the second on.
        """
        ids, lengths = _padded([row for example in examples for row in example.rows])
        last = lengths[:, None] - 1
        hidden = self.gpt.hidden(ids, logit_positions=None if with_language else last)  # (rows, seq or 1, n_embd)
        ends = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[2])) if with_language else hidden
        outputs = self.outputs(ends[:, 0], examples)
        targets = torch.tensor([example.target for example in examples])
        if self.has_classes:
            task_loss = F.cross_entropy(outputs, targets)
        else:
            task_loss = F.mse_loss(outputs[:, 0], targets.float())
        return task_loss, self._language_loss(hidden, ids, lengths) if with_language else None

    def outputs(self, ends: Tensor, examples: Sequence[Example]) -> Tensor:
        """Return the logits of each example, (examples, labels or choices), from each row's last hidden state.

        Of a pair, the hidden states of both orders are added. Choices that an example does not have get -inf.
        """
        if self.task == SIMILARITY:
            ends = ends.view(-1, 2, ends.shape[1]).sum(1)
        logits: Tensor = self.score(self.drop(ends))
        if self.task != MULTIPLE_CHOICE:
            return logits
        scores = torch.split(logits[:, 0], [len(example.rows) for example in examples])
        return nn.utils.rnn.pad_sequence(list(scores), batch_first=True, padding_value=-math.inf)

    def _language_loss(self, hidden: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        counts = torch.arange(1, ids.shape[1]) < lengths[:, None]  # (rows, seq - 1): the next token is no padding
        logits = F.linear(hidden[:, :-1][counts], self.gpt.head.weight)
        nats = F.cross_entropy(logits, ids[:, 1:][counts], reduction="none")
        weights = (counts / counts.sum(1, keepdim=True).clamp(min=1))[counts]
        return (nats * weights).sum() / len(ids)


@torch.no_grad()
def measure(network: FineTuned, examples: Sequence[Example]) -> tuple[float, float]:
    """Return the mean loss of the task, and the accuracy, or the mean absolute error of a regression."""
    network.eval()
    ordered = sorted(examples, key=_width)  # so that parts have little padding
    loss = metric = 0.0
    for batch in parts_of(ordered):
        ids, lengths = _padded([row for example in batch for row in example.rows])
        ends = network.gpt.hidden(ids, logit_positions=lengths[:, None] - 1)[:, 0]
        outputs, targets = network.outputs(ends, batch), torch.tensor([example.target for example in batch])
        if network.has_classes:
            loss += F.cross_entropy(outputs, targets, reduction="sum").item()
            metric += (outputs.argmax(1) == targets).sum().item()
        else:
            differences = outputs[:, 0] - targets.float()
            loss += differences.square().sum().item()
            metric += differences.abs().sum().item()
    return loss / len(examples), metric / len(examples)


def parts_of(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Split examples, in their order, into parts of at most PART_TOKENS tokens, padding included, or of one example."""
    part: list[Example] = []
    width = rows = 0
    for example in examples:
        width, rows = max(width, _width(example)), rows + len(example.rows)
        if part and width * rows > PART_TOKENS:
            yield part
            part, width, rows = [], _width(example), len(example.rows)
        part.append(example)
    if part:
        yield part


def _width(example: Example) -> int:
    return max(map(len, example.rows))


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return rows of ids padded on the right, where no token sees the padding, (rows, seq), and their lengths."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return ids, torch.tensor([len(row) for row in rows])


def with_new_tokens(gpt: GPT, config: FineTuneConfig, new_ids: Sequence[int]) -> GPT:
    """Return a copy of the network with this dropout, and new embeddings for the tokens `new_ids`."""
    size = max(gpt.config.vocab_size, *(token_id + 1 for token_id in new_ids), 1)
    rate = config.dropout
    network = GPT(replace(gpt.config, vocab_size=size, resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate))
    state = dict(gpt.state_dict())
    random = torch.Generator().manual_seed(config.seed)
    for name in ("wte.weight", "lm_head.weight"):
        if name not in state:
            continue
        rows = torch.zeros(size, gpt.config.n_embd)
        rows[: len(state[name])] = state[name]
        for token_id in new_ids:
            rows[token_id] = torch.randn(gpt.config.n_embd, generator=random) * _NEW_ROW_STD
        state[name] = rows
    network.load_state_dict(state)
    return network
