"""Fine-tune a language model for a task, as GPT-1 was (Radford et al. 2018, section 3.3): a new linear head.

The loss is the task's, and beside it the language model's on the same rows. Every random choice of step s depends on
(seed, s) alone, so a training that resumes after an interruption gives the same weights. Knows no text and no ONNX.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ortgpt_models.atomic_folder import refuse_existing
from ortgpt_models.classifier import TEXT_CLASSIFIERS, ClassifierConfig, GPTClassifier, body_config
from ortgpt_models.config import PRE
from ortgpt_models.errors import ModelError
from ortgpt_models.finetune_config import FineTuneConfig
from ortgpt_models.finetune_network import FineTuned, measure, parts_of, with_new_tokens
from ortgpt_models.gpt import GPT
from ortgpt_models.progress import OnProgress, Progress
from ortgpt_models.task_data import Example, TaskData
from ortgpt_models.training_state import TrainingState

_ADAM_BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """The losses of one step of training, dropout included."""

    step: int
    """The step, counted from 1."""
    task_loss: float
    """The mean cross-entropy in nats, or the mean squared error of a regression."""
    language_loss: float | None
    """The mean cross-entropy of the next token in nats; None without the auxiliary loss."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The loss on the held-out rows."""

    step: int
    """How many steps came before."""
    loss: float
    """The task's loss: the mean cross-entropy in nats, or the mean squared error of a regression."""
    metric: float
    """The accuracy, or the mean absolute error of a regression."""


@dataclass
class Losses:
    """How the losses went."""

    training: list[TrainedStep] = field(default_factory=list)
    """Each step."""
    held_out: list[Measurement] = field(default_factory=list)
    """Each measurement on the held-out rows."""

    @property
    def best(self) -> Measurement:
        """The measurement with the lowest loss, of equal ones the first."""
        return min(self.held_out, key=lambda each: each.loss)

    @property
    def stale(self) -> int:
        """How many measurements came after the best one."""
        return len(self.held_out) - 1 - self.held_out.index(self.best)


@dataclass(frozen=True, kw_only=True)
class FineTuningResult:
    """A fine-tuned network and how it came about."""

    classifier: GPTClassifier
    """The network of the best measurement, in evaluation mode."""
    losses: Losses
    """How the losses went."""
    steps: int
    """How many steps were trained."""


def finetune(
    gpt: GPT,
    data: TaskData,
    out: Path,
    *,
    config: FineTuneConfig,
    new_ids: Sequence[int],
    start_id: int,
    source: str,
    write: Callable[[FineTuningResult], None],
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> FineTuningResult:
    """Fine-tune a copy of `gpt` on `data`, let `write` put the result into the folder `out`, and return it.

    The tokens `new_ids` get new embeddings, and rows in the model where it has too few; `start_id` begins each row, and
    batches are padded with it. `source` is the sha256 of the weights. `on_progress` counts steps; its activity is the
    task's loss. `on_note` gets a line for each measurement on the held-out rows, and one if the training resumes: state
    is saved beside `out` every `save_every` steps and at the end, and a later call with the same arguments goes on from
    it. The caller's random state of torch stays as it was. Raises ModelError for a loss that is not finite, and where
    another process trains `out`; FileExistsError if `out` exists.
    """
    refuse_existing(out)
    identity = {"recipe": asdict(config), "data": data.sha256, "weights": source, "new_ids": [*new_ids]}
    state = TrainingState(out, identity)
    with state.kept(), torch.random.fork_rng(devices=[]):
        refuse_existing(out)  # the process that held the state until now may have written it
        run = _Run(gpt, data, config, new_ids, state)
        run.train(on_progress, on_note)
        result = run.result(start_id)
        write(result)
        state.remove()
    return result


class _Run:
    """The steps of one fine-tuning."""

    def __init__(
        self, gpt: GPT, data: TaskData, config: FineTuneConfig, new_ids: Sequence[int], state: TrainingState
    ) -> None:
        torch.manual_seed(config.seed)
        self._data = data
        self._config = config
        self._state = state
        self._network = FineTuned(with_new_tokens(gpt, config, new_ids), data, config.head_dropout)
        self._optimizer = _make_optimizer(self._network, config)
        self._losses = Losses()
        self._best: dict[str, Tensor] = {}
        self._per_epoch = config.steps_per_epoch(len(data.training))
        self._steps = self._per_epoch * config.epochs
        self._evaluate_every = config.evaluate_every or self._per_epoch

    def train(self, on_progress: OnProgress, on_note: Callable[[str], None]) -> None:
        """Train from the saved state on, or from the first step."""
        if self._resume():
            on_note(f"resumes at step {self._done} of {self._steps}, as saved in {self._state.folder}")
        while self._done < self._steps and not self._is_stopped:
            self._losses.training.append(self._step(self._done))
            if self._done % self._evaluate_every == 0 or self._done == self._steps:
                self._measure(on_note)
            if self._done % self._config.save_every == 0 or self._done == self._steps or self._is_stopped:
                self._save()
            on_progress(Progress(f"loss {self._losses.training[-1].task_loss:.3f}", self._done, self._steps))
        if self._done < self._steps:
            on_note(
                f"stopped at step {self._done} of {self._steps}: {self._losses.stale} measurements without a lower "
                "held-out loss"
            )

    def result(self, start_id: int) -> FineTuningResult:
        """Return the network of the best measurement."""
        self._network.load_state_dict(self._best)
        gpt = self._network.gpt.requires_grad_(False)
        if not gpt.config.tie_word_embeddings:  # the language model's head has served
            del gpt.lm_head
        gpt.config = replace(body_config(gpt.config), bos_token_id=start_id)
        labels = ClassifierConfig(
            architecture=TEXT_CLASSIFIERS[0 if gpt.config.norm == PRE else 1],
            labels=self._data.labels,
            problem_type=self._data.problem_type,
            pad_token_id=start_id,
            finetuning_task=self._data.task,
        )
        head = {f"{labels.head_name}.weight": self._network.score.weight.detach()}
        classifier = GPTClassifier(gpt, labels, head).eval()
        return FineTuningResult(classifier=classifier, losses=self._losses, steps=self._done)

    @property
    def _done(self) -> int:
        return len(self._losses.training)

    @property
    def _is_stopped(self) -> bool:
        patience, held_out = self._config.patience, self._losses.held_out
        return bool(patience and held_out and self._losses.stale >= patience)

    def _step(self, step: int) -> TrainedStep:
        config, training = self._config, self._data.training
        epoch, place = divmod(step, self._per_epoch)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(config.seed * 1_000_003 + epoch))
        batch = [training[index] for index in order[place * config.batch_size :][: config.batch_size].tolist()]
        torch.manual_seed(config.seed * 1_000_003 + step)  # dropout of this step, whatever came before
        self._network.train()
        self._optimizer.zero_grad(set_to_none=True)
        task_loss, language_loss = self._add_gradients(batch)
        loss = task_loss + config.aux_weight * language_loss
        if not math.isfinite(loss):
            raise ModelError(f"loss became {loss} at step {step}; use a learning rate below {config.learning_rate}")
        nn.utils.clip_grad_norm_(self._network.parameters(), config.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step, self._steps)
        self._optimizer.step()
        language = language_loss if config.aux_weight > 0 else None
        return TrainedStep(step=step + 1, task_loss=task_loss, language_loss=language)

    def _add_gradients(self, batch: Sequence[Example]) -> tuple[float, float]:
        """Add the gradients of a batch, a few examples at a time, and return its two losses."""
        count, rows = len(batch), sum(len(example.rows) for example in batch)
        task_loss = language_loss = 0.0
        for part in parts_of(batch):
            task, language = self._network.losses(part, with_language=self._config.aux_weight > 0)
            loss = task = task * (len(part) / count)
            if language is not None:
                language = language * (sum(len(example.rows) for example in part) / rows)
                loss = task + self._config.aux_weight * language
                language_loss += language.item()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            task_loss += task.item()
        return task_loss, language_loss

    def _measure(self, on_note: Callable[[str], None]) -> None:
        loss, metric = measure(self._network, self._data.held_out)
        self._losses.held_out.append(Measurement(step=self._done, loss=loss, metric=metric))
        if self._losses.stale == 0:
            self._best = copy.deepcopy(self._network.state_dict())
        name = "accuracy" if self._data.has_classes else "mean absolute error"
        on_note(f"step {self._done} of {self._steps}: held-out loss {loss:.4f}, {name} {metric:.4f}")

    def _save(self) -> None:
        self._state.save(
            {
                "network": self._network.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "best": self._best,
                "training": [asdict(each) for each in self._losses.training],
                "held_out": [asdict(each) for each in self._losses.held_out],
            }
        )

    def _resume(self) -> bool:
        """Restore the saved state, if there is one; tell whether there was."""
        saved: Mapping[str, Any] | None = self._state.load()
        if saved is None:
            return False
        try:
            self._network.load_state_dict(saved["network"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self._best = dict(saved["best"])
            self._losses = Losses(
                training=[TrainedStep(**each) for each in saved["training"]],
                held_out=[Measurement(**each) for each in saved["held_out"]],
            )
        except Exception as error:  # torch raises many kinds for values that do not fit
            raise self._state.damaged(error) from error
        return True


def _make_optimizer(network: FineTuned, config: FineTuneConfig) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in network.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=_ADAM_BETAS, fused=True)
