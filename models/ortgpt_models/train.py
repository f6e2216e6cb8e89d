"""Train a language model on plain text, from scratch or from a network that exists, into a folder.

One process, one corpus that fits in memory. Every random choice of step s depends on (seed, s) alone, so a training
that resumes after an interruption gives the same weights as one that was never interrupted. Knows nothing of ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ortgpt_models.atomic_folder import refuse_existing, write_folder
from ortgpt_models.corpus import HELD_OUT_SHARE, Corpus, encode_corpus, read_texts
from ortgpt_models.errors import ModelError
from ortgpt_models.progress import OnProgress, Progress
from ortgpt_models.starting_point import StartingPoint, from_scratch, write_json
from ortgpt_models.training_config import TrainingConfig
from ortgpt_models.training_device import choose_device
from ortgpt_models.training_state import TrainingState

RECORD_FILE = "training.json"
_ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """How well a trained network predicts the held-out text."""

    losses: tuple[tuple[int, float], ...]
    """Its loss there in bits per UTF-8 byte, after a number of steps; the last one with the weights that were written.
    The first one, if the training started from a network, is that network's, after 0 steps."""

    @property
    def bits_per_byte(self) -> float:
        """The last loss."""
        return self.losses[-1][1]

    @property
    def bits_per_byte_before(self) -> float | None:
        """The loss of the network that the training started from; None from scratch."""
        steps, loss = self.losses[0]
        return None if steps else loss


def train(
    texts: Sequence[Path],
    out: Path,
    *,
    config: TrainingConfig,
    held_out: Path | None = None,
    start: StartingPoint | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> TrainingResult:
    """Train on UTF-8 text files, write the folder `out`, and return the held-out loss.

    Without `start`, the network is made as `config` says. Without `held_out`, the last 5% of the text is held out.
    `on_progress` counts steps; its activity is the loss, in nats per token. `on_note` gets one line for each
    measurement on the held-out text, and one if the training resumes: state is saved beside `out` every `save_every`
    steps, and a later call with the same arguments starts from it. The caller's random state of torch stays as it was.
    Raises ModelError for texts or a configuration that cannot be trained with, and where another process trains `out`;
    FileExistsError if `out` exists.
    """
    refuse_existing(out)
    config = config.resolved() if start is None else config.resolved_from(start.n_positions, start.learning_rate)
    device = choose_device(config.device, bfloat16=config.bfloat16, compiles=config.compile)
    config = replace(config, device=device.type)
    read = read_texts(texts, held_out)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(config.seed)
        point = from_scratch(read, config) if start is None else start
        corpus = encode_corpus(read, point.encode, point.end_of_text_id, config.window or point.n_positions)
        recipe = {name: value for name, value in asdict(config).items() if value is not None}
        state = TrainingState(out, {"recipe": recipe, "corpus": read.sha256, "start": point.sha256})
        with state.kept():
            refuse_existing(out)  # the process that held the state until now may have written it
            result = _Training(point, corpus, config, device).run(state, on_progress, on_note)
            record = {
                "recipe": recipe,
                **point.record,
                "texts": [path.name for path in texts],
                "held_out": held_out.name if held_out else f"last {HELD_OUT_SHARE:.0%} of the text",
                "corpus_sha256": read.sha256,
                "train_tokens": len(corpus.train_ids),
            }
            _write(point, record, result, out)
            state.remove()
    return result


class _Training:
    """A network in training on a device."""

    def __init__(self, start: StartingPoint, corpus: Corpus, config: TrainingConfig, device: torch.device) -> None:
        self.start, self.corpus, self.config, self.device = start, corpus, config, device
        self.network = start.network.to(device)
        self.forward: Callable[[Tensor], Tensor] = self.network
        if config.compile:
            self.forward = torch.compile(self.network)
        self.weights = {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}
        self.optimizer = _make_optimizer(self.weights.values(), config)
        self.losses: list[tuple[int, float]] = []

    def run(self, state: TrainingState, on_progress: OnProgress, on_note: Callable[[str], None]) -> TrainingResult:
        """Train from the saved state on, or from the first step, and measure the weights as they are written."""
        steps = self.config.steps
        first_step = self._resume(state)
        if first_step:
            on_note(f"resumes at step {first_step} of {steps}, as saved in {state.folder}")
        elif self.start.sha256 is not None:
            self._measure(0, on_note)
        for step in range(first_step, steps):
            loss = self._step(step)
            if not math.isfinite(loss):
                raise ModelError(
                    f"loss became {loss} at step {step}; use a learning rate below {self.config.learning_rate}"
                )
            steps_done = step + 1
            if steps_done % self.config.evaluate_every == 0 and steps_done < steps:
                self._measure(steps_done, on_note)
            if steps_done % self.config.save_every == 0 and steps_done < steps:
                state.save(self._values(steps_done))
            on_progress(Progress(f"loss {loss:.3f}", steps_done, steps))
        self.network.to(self.start.dtype).float()
        self._measure(steps)
        return TrainingResult(losses=tuple(self.losses))

    def _values(self, steps_done: int) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        optimizer = self.optimizer.state_dict()
        return {"weights": weights, "optimizer": optimizer, "step": steps_done, "losses": self.losses}

    def _resume(self, state: TrainingState) -> int:
        """Restore the saved state, if there is one; return the number of steps done."""
        saved = state.load()
        if saved is None:
            return 0
        try:
            if saved["weights"].keys() != self.weights.keys():
                raise ModelError("it has other weights")
            self.network.load_state_dict(saved["weights"], strict=False)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.losses = [(int(steps), float(loss)) for steps, loss in saved["losses"]]
            return int(saved["step"])
        except Exception as error:  # torch raises many kinds for values that do not fit
            raise state.damaged(error) from error

    def _step(self, step: int) -> float:
        """Take one step of the optimiser; return the loss in nats per token."""
        config, ids = self.config, self.corpus.train_ids
        torch.manual_seed(config.seed * 1_000_003 + step)  # windows and dropout of this step, whatever came before
        window = config.window or self.start.n_positions
        parts = config.gradient_accumulation_steps
        starts = torch.randint(len(ids) - window, (config.batch_size * parts, 1))
        windows = ids[starts + torch.arange(window + 1)]  # (batch × parts, window + 1)
        self.network.train()
        self.optimizer.zero_grad(set_to_none=True)
        batches = torch.split(windows, config.batch_size)
        loss = math.fsum([self._add_gradient(batch.to(self.device)) for batch in batches])
        torch.nn.utils.clip_grad_norm_(self.weights.values(), config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        self.optimizer.step()
        return loss

    def _add_gradient(self, windows: Tensor) -> float:
        """Add the gradient of one batch, (batch, window + 1), and return its part of the step's loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bfloat16):
            logits = self.forward(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss = loss / self.config.gradient_accumulation_steps
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss.item()

    def _measure(self, steps: int, on_note: Callable[[str], None] = lambda note: None) -> None:
        window = self.config.window or self.start.n_positions
        loss = bits_per_byte(self.network, self.corpus, window=window, batch_size=self.config.batch_size)
        self.losses.append((steps, loss))
        on_note(f"step {steps}: held out {loss:.4f} bits per byte")


@torch.no_grad()
def bits_per_byte(network: nn.Module, corpus: Corpus, *, window: int, batch_size: int) -> float:
    """Return the loss on the held-out text in bits per UTF-8 byte, in windows that do not overlap."""
    network.eval()
    device = next(network.parameters()).device
    inputs, targets = corpus.held_out_ids[:-1], corpus.held_out_ids[1:]
    whole = len(inputs) // window * window
    batches = [
        *zip(
            torch.split(inputs[:whole].view(-1, window), batch_size),
            torch.split(targets[:whole].view(-1, window), batch_size),
            strict=True,
        ),
        (inputs[None, whole:], targets[None, whole:]),
    ]
    nats = 0.0
    for x, y in batches:
        if x.numel():
            logits = network(x.to(device))
            nats += F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
    return nats / math.log(2) / corpus.held_out_bytes


def _make_optimizer(weights: Collection[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    matrices = [weight for weight in weights if weight.dim() == 2]
    vectors = [weight for weight in weights if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate_at(0), betas=_ADAM_BETAS, fused=True)


def _write(start: StartingPoint, record: Mapping[str, Any], result: TrainingResult, out: Path) -> None:
    measured = {
        "parameters": sum(weight.numel() for weight in start.network.parameters()),
        "held_out_bits_per_byte": round(result.bits_per_byte, 5),
        "held_out_losses": [[steps, round(loss, 5)] for steps, loss in result.losses],
    }
    with write_folder(out) as folder:
        start.write(folder)
        write_json(folder, {RECORD_FILE: {**record, **measured}})
