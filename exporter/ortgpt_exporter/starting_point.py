"""Make of a checkpoint what a training starts from: all its weights, or a LoRA beside them. Knows no ONNX."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ortgpt.contract import File, TokenizerKind
from ortgpt_exporter.adapter_settings import AdapterSettings
from ortgpt_exporter.checkpoint.load import Checkpoint, CheckpointSource, load_checkpoint
from ortgpt_exporter.checkpoint.lora import ADAPTER_FILES, as_transformers
from ortgpt_exporter.checkpoint.tokenizer_folder import TokenizerFiles
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.portable_files import portable_files
from ortgpt_models.gpt import GPT
from ortgpt_models.hf_checkpoint import save_gpt
from ortgpt_models.progress import OnProgress
from ortgpt_models.quiet import quiet_warnings
from ortgpt_models.starting_point import StartingPoint, trainable, write_json
from ortgpt_models.training_config import FINE_TUNING_RATE, LORA_RATE, TrainingConfig

# The product that makes query, key and value, which peft adapts by default: the whole of a LoRA in its paper.
_TARGET = "c_attn"


def open_starting_point(
    source: CheckpointSource,
    config: TrainingConfig,
    adapter: AdapterSettings | None = None,
    *,
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> StartingPoint:
    """Load the checkpoint that `source` names, to train its weights, or, with `adapter`, a LoRA.

    What the training writes is a Hugging Face folder in float32 with the checkpoint's tokenizer and generation
    defaults, or the folder of a PEFT adapter. Raises ExportError for a checkpoint that cannot be loaded, a classifier
    and one without a tokenizer; ModelError for settings that would have no effect; ModuleNotFoundError naming `peft`
    for an adapter without that package.
    """
    config.refuse_shape()
    if adapter is not None and adapter.lora_rank is not None:
        import peft  # noqa: F401  # to fail before a download, not after it
    else:
        adapter = None
    checkpoint = load_checkpoint(source, on_progress=on_progress)
    if checkpoint.classifier is not None:
        raise ExportError(
            f"{source.name} is a classifier ({checkpoint.classifier.config.architecture}); a training on text starts "
            "from a language model"
        )
    if checkpoint.tokenizer_files.kind == TokenizerKind.NONE:
        raise ExportError("tokenizer = none: a text cannot be encoded without one; name the checkpoint's own")
    for note in checkpoint.notes:
        on_note(note)
    gpt = trainable(checkpoint.gpt, config.dropout)
    adapted = None if adapter is None else _Adapted(gpt, adapter, source, config.seed)
    return StartingPoint(
        adapted or gpt,
        n_positions=gpt.config.n_positions,
        encode=_Encoder(checkpoint.tokenizer_files, on_note),
        end_of_text_id=gpt.config.eos_token_id,
        write=adapted.write if adapted else _Writer(gpt, replace(checkpoint, gpt=gpt)),
        sha256=_digest(checkpoint, gpt, adapter),
        record=_record(checkpoint, adapter),
        learning_rate=FINE_TUNING_RATE if adapter is None else LORA_RATE,
    )


@dataclass(frozen=True)
class _Encoder:
    """Encodes texts with the checkpoint's tokenizer, and notes how many tokens of a text it does not know."""

    files: TokenizerFiles
    on_note: Callable[[str], None]

    def __call__(self, text: str) -> list[int]:
        ids = self.files.tokenizer.encode(text)
        unknown_id = self.files.vocab.get(self.files.roles.get("unk_token", ""))
        unknown = 0 if unknown_id is None else ids.count(unknown_id)
        if unknown:
            self.on_note(f"the tokenizer does not know {unknown:,} of the {len(ids):,} tokens of a text")
        return ids


@dataclass(frozen=True)
class _Writer:
    """Writes a trained network with the tokenizer, the generation defaults and the licence of its checkpoint."""

    gpt: GPT
    checkpoint: Checkpoint

    def __call__(self, folder: Path) -> None:
        files, config = self.checkpoint.tokenizer_files, self.gpt.config
        save_gpt(self.gpt, folder)
        for name, text in {**files.texts, **portable_files(config, files, generates=False)}.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        defaults = {key: value for key, value in self.checkpoint.generation_config.items() if value != []}
        write_json(folder, {File.GENERATION_CONFIG: defaults})
        if self.checkpoint.source.licence is not None:  # the export takes it from here
            card = f"---\nlicense: {self.checkpoint.source.licence}\n---\nTrained from {self.checkpoint.source.id}.\n"
            (folder / "README.md").write_text(card, encoding="utf-8", newline="\n")


class _Adapted(nn.Module):
    """The network of `transformers` with a LoRA, which `peft` computes; only the LoRA requires a gradient."""

    def __init__(self, gpt: GPT, settings: AdapterSettings, source: CheckpointSource, seed: int) -> None:
        import peft

        super().__init__()
        config = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            base_model_name_or_path=str(source.name),
            revision=source.revision,
            r=settings.lora_rank or 0,
            lora_alpha=settings.alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=[_TARGET],
            fan_in_fan_out=True,  # as Conv1D stores its weight
        )
        with torch.random.fork_rng(devices=[]), quiet_warnings():  # peft asks transformers for an outdated property
            torch.manual_seed(seed)
            self.model = peft.PeftModel(as_transformers(gpt), config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits, (batch, seq, vocab_size), of token ids, int64 (batch, seq)."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    def write(self, folder: Path) -> None:
        """Write the LoRA as save_pretrained() of `peft` does, but for the model card."""
        import peft

        tensors = peft.get_peft_model_state_dict(self.model, save_embedding_layers=False)
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        (folder / ADAPTER_FILES[0]).write_bytes(save(contiguous, metadata={"format": "pt"}))
        self.model.peft_config[self.model.active_adapter].save_pretrained(str(folder))


def _record(checkpoint: Checkpoint, adapter: AdapterSettings | None) -> dict[str, Any]:
    """Return what training.json says of the starting point."""
    origin = checkpoint.source
    record: dict[str, Any] = {"from": {"id": origin.id, "revision": origin.revision, "sha256": origin.sha256}}
    return record if adapter is None else record | {"adapter": asdict(adapter) | {"lora_alpha": adapter.alpha}}


def _digest(checkpoint: Checkpoint, gpt: GPT, adapter: AdapterSettings | None) -> str:
    """Return a digest of whatever of the starting point decides the result of a training."""
    parts: list[Any] = [checkpoint.source.sha256, gpt.config.to_dict(), dict(checkpoint.tokenizer_files.texts)]
    if adapter is not None:
        parts.append([adapter.lora_rank, adapter.alpha, adapter.lora_dropout])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
