"""Train a small GPT-2 from scratch on plain text, into a Hugging Face folder.

One process, one corpus that fits in memory. Every random choice of step s depends on (seed, s) alone, so a training
that resumes after an interruption gives the same weights as one that was never interrupted. Knows nothing of ONNX.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional as F

from ortgpt_models.atomic_folder import refuse_existing, write_folder
from ortgpt_models.errors import ModelError
from ortgpt_models.files import read_text
from ortgpt_models.gpt import GPT
from ortgpt_models.hf_checkpoint import save_gpt
from ortgpt_models.progress import OnProgress, Progress
from ortgpt_models.training_config import TrainingConfig
from ortgpt_models.training_state import TrainingState

END_OF_TEXT = "<|endoftext|>"
RECORD_FILE = "training.json"
_HELD_OUT_SHARE = 0.05
_ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Corpus:
    """The text to train on and the text to measure on, as token ids."""

    tokenizer: ByteLevelBPETokenizer
    """The byte-level BPE, trained on the part that is trained on."""
    train_ids: Tensor
    """Token ids to train on, int64 (tokens,); end-of-text after each document."""
    held_out_ids: Tensor
    """Token ids to measure on, int64 (1 + tokens,); the first is end-of-text."""
    held_out_bytes: int
    """Size of the held-out text in UTF-8 bytes."""
    end_of_text_id: int
    """The id of end-of-text."""
    sha256: str
    """Digest of both texts: a training resumes only with the same ones."""


def train(
    texts: Sequence[Path],
    out: Path,
    *,
    config: TrainingConfig,
    held_out: Path | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> float:
    """Train on UTF-8 text files and write the checkpoint folder `out`; return the held-out loss in bits per byte.

    Without `held_out`, the last 5% of the text is held out. `on_progress` counts steps; its activity is the loss, in
    nats per token. `on_note` gets one line for each measurement on the held-out text, and one if the training resumes:
    state is saved beside `out` every `save_every` steps, and a later call with the same `config` and texts starts from
    it. The caller's random state of torch stays as it was. Raises ModelError for texts or a configuration that cannot
    be trained with, and where another process trains `out`; FileExistsError if `out` exists.
    """
    refuse_existing(out)
    corpus = read_corpus(texts, held_out, config)
    state = TrainingState(out, {"recipe": asdict(config), "corpus": corpus.sha256})
    with state.kept(), torch.random.fork_rng(devices=[]):
        refuse_existing(out)  # the process that held the state until now may have written it
        bits, gpt = _train(corpus, config, state, on_progress, on_note)
        _write_checkpoint(gpt, corpus, config, texts, held_out, bits, out)
        state.remove()
    return bits


def _train(
    corpus: Corpus,
    config: TrainingConfig,
    state: TrainingState,
    on_progress: OnProgress,
    on_note: Callable[[str], None],
) -> tuple[float, GPT]:
    """Train from the saved state on, or from the first step; return bits per byte and the network in float16 values."""
    torch.manual_seed(config.seed)
    gpt = GPT(config.gpt_config(end_of_text_id=corpus.end_of_text_id))
    optimizer = _make_optimizer(gpt, config)
    first_step = _resume(state, gpt, optimizer)
    if first_step:
        on_note(f"resumes at step {first_step} of {config.steps}, as saved in {state.folder}")
    for step in range(first_step, config.steps):
        loss = _train_step(gpt, optimizer, corpus.train_ids, config, step)
        if not math.isfinite(loss):
            raise ModelError(f"loss became {loss} at step {step}; use a learning rate below {config.learning_rate}")
        steps_done = step + 1
        if steps_done % config.save_every == 0 and steps_done < config.steps:
            state.save({"gpt": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": steps_done})
        if steps_done % config.evaluate_every == 0 and steps_done < config.steps:
            bits = bits_per_byte(gpt, corpus, config.batch_size)
            on_note(f"step {steps_done}: held out {bits:.4f} bits per byte")
        on_progress(Progress(f"loss {loss:.3f}", steps_done, config.steps))
    gpt.half().float()  # measure what is written: float16 weights
    return bits_per_byte(gpt, corpus, config.batch_size), gpt


def read_corpus(texts: Sequence[Path], held_out: Path | None, config: TrainingConfig) -> Corpus:
    """Read the texts, train a byte-level BPE on the part to train on, and encode both parts.

    Raises ModelError for a text that is empty, not UTF-8 or too short, or that holds end-of-text.
    """
    documents = [_read_text(path) for path in texts]
    if held_out is None:
        documents, measured = _cut_off_end(documents)
    else:
        measured = _read_text(held_out)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        iter(documents), vocab_size=config.vocab_size, special_tokens=[END_OF_TEXT], show_progress=False
    )
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise ModelError(
            f"the text yields a vocabulary of only {tokenizer.get_vocab_size()} tokens, not {config.vocab_size}; "
            "use more text or a smaller vocab_size"
        )
    end_of_text_id = tokenizer.encode(END_OF_TEXT).ids[0]
    train_ids = [token_id for text in documents for token_id in [*tokenizer.encode(text).ids, end_of_text_id]]
    held_out_ids = [end_of_text_id, *tokenizer.encode(measured).ids]
    if len(train_ids) <= config.n_positions or len(held_out_ids) < 2:
        raise ModelError(
            f"{len(train_ids)} tokens to train on and {len(held_out_ids) - 1} held out are too few "
            f"(accepted: more than n_positions = {config.n_positions}, and 1 or more)"
        )
    digest = hashlib.sha256(json.dumps([documents, measured]).encode()).hexdigest()
    measured_bytes = len(measured.encode())
    return Corpus(
        tokenizer, torch.tensor(train_ids), torch.tensor(held_out_ids), measured_bytes, end_of_text_id, digest
    )


@torch.no_grad()
def bits_per_byte(gpt: GPT, corpus: Corpus, batch_size: int) -> float:
    """Return the loss on the held-out text in bits per UTF-8 byte, in windows of n_positions that do not overlap."""
    gpt.eval()
    length = gpt.config.n_positions
    inputs, targets = corpus.held_out_ids[:-1], corpus.held_out_ids[1:]
    whole = len(inputs) // length * length
    batches = [
        *zip(
            torch.split(inputs[:whole].view(-1, length), batch_size),
            torch.split(targets[:whole].view(-1, length), batch_size),
            strict=True,
        ),
        (inputs[None, whole:], targets[None, whole:]),
    ]
    nats = 0.0
    for x, y in batches:
        if x.numel():
            nats += F.cross_entropy(gpt(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    return nats / math.log(2) / corpus.held_out_bytes


def _cut_off_end(documents: list[str]) -> tuple[list[str], str]:
    """Split the texts, in their order, into those to train on and the last share of their characters."""
    room = int(sum(map(len, documents)) * (1 - _HELD_OUT_SHARE))
    kept, rest = [], []
    for document in documents:
        kept.append(document[:room])
        rest.append(document[room:])
        room = max(0, room - len(document))
    return [text for text in kept if text], "".join(rest)


def _read_text(path: Path) -> str:
    text = read_text(Path(path))
    if not text.strip():
        raise ModelError(f"{path} holds no text")
    if END_OF_TEXT in text:
        raise ModelError(f"{path} holds the text {END_OF_TEXT}, which marks the end of a document; remove it")
    return text


def _make_optimizer(gpt: GPT, config: TrainingConfig) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in gpt.parameters() if parameter.dim() == 2]
    vectors = [parameter for parameter in gpt.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=_ADAM_BETAS, fused=True)


def _resume(state: TrainingState, gpt: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Restore the saved state, if there is one; return the number of steps done."""
    saved = state.load()
    if saved is None:
        return 0
    try:
        gpt.load_state_dict(saved["gpt"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])
    except Exception as error:  # torch raises many kinds for values that do not fit
        raise state.damaged(error) from error


def _train_step(gpt: GPT, optimizer: torch.optim.Optimizer, ids: Tensor, config: TrainingConfig, step: int) -> float:
    torch.manual_seed(config.seed * 1_000_003 + step)  # windows and dropout of this step, whatever came before
    starts = torch.randint(len(ids) - config.n_positions, (config.batch_size, 1))
    windows = ids[starts + torch.arange(config.n_positions + 1)]  # (batch, n_positions + 1)
    gpt.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
        logits = gpt(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), config.clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    optimizer.step()
    return loss.item()


def _write_checkpoint(
    gpt: GPT,
    corpus: Corpus,
    config: TrainingConfig,
    texts: Sequence[Path],
    held_out: Path | None,
    bits: float,
    out: Path,
) -> None:
    record = {
        "recipe": asdict(config),
        "texts": [path.name for path in texts],
        "held_out": held_out.name if held_out else f"last {_HELD_OUT_SHARE:.0%} of the text",
        "corpus_sha256": corpus.sha256,
        "train_tokens": len(corpus.train_ids),
        "held_out_bits_per_byte": round(bits, 5),
    }
    with write_folder(out) as folder:
        save_gpt(gpt, folder, dtype=torch.float16)
        corpus.tokenizer.save_model(str(folder))
        (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8", newline="\n")
