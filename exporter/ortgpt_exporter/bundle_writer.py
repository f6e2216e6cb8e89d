"""Export a checkpoint into a bundle folder: every step in order, whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir

from ortgpt.bundle import Bundle, ModelConfig, describe_files, is_bundle_name, open_bundle
from ortgpt.contract import (
    MINIMUM_ONNXRUNTIME,
    CacheKind,
    DType,
    File,
    Flavour,
    Key,
    Promise,
    Role,
    Target,
)
from ortgpt.engine import Engine
from ortgpt.errors import OptionError
from ortgpt.manifest import CacheSpec, Check, GraphSpec, Manifest, Precision
from ortgpt.session import open_session
from ortgpt_exporter.checkpoint import Checkpoint, load_checkpoint
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.export import export_native, native_tensors_of, padded_head_dim
from ortgpt_exporter.optimize import optimize_native
from ortgpt_exporter.verify import check_names, verify
from ortgpt_models.folder import refuse_existing, write_folder

DTYPES = (DType.FLOAT32,)
_MAX_MODEL_BYTES = 2**31 - 1  # of one protobuf file


@dataclass(frozen=True)
class Progress:
    """What is being done now, and how many of the steps are done."""

    activity: str
    done: int
    total: int


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str = DType.FLOAT32,
    force: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Bundle:
    """Export a checkpoint (see load_checkpoint) to the bundle folder `out` and return it opened.

    The graph is compared with PyTorch before anything appears at `out`. `force` replaces a bundle that is already
    there, and nothing else. Raises ModelError, ExportError, OptionError, FileExistsError or another OSError.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype = {dtype!r} (accepted: {', '.join(DTYPES)})")
    out = Path(out)
    _check_target(out, force=force)
    on_progress(Progress("loading the checkpoint", 0, 1))
    loaded = load_checkpoint(checkpoint)
    steps = _Steps(on_progress, len(check_names(loaded.gpt.config.n_positions)))
    with write_folder(out, replace=force) as folder:
        manifest = _write(loaded, folder, steps)
        checks = _verify(folder, manifest, loaded, steps)
        steps.next("writing the manifest")
        manifest = replace(manifest, verification=checks)
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        open_bundle(folder)
    steps.finish()
    return open_bundle(out)


def _write(loaded: Checkpoint, folder: Path, steps: _Steps) -> Manifest:
    """Write every file but the manifest; return the manifest without its verification."""
    config = loaded.gpt.config
    weight_bytes = 4 * sum(parameter.numel() for parameter in loaded.gpt.parameters())
    if weight_bytes > _MAX_MODEL_BYTES * 0.98:
        raise ExportError(f"the weights take {weight_bytes:,} bytes in float32; this version writes at most 2 GiB")
    steps.next("exporting the graph")
    model = export_native(loaded.gpt)
    steps.next("optimising the graph")
    optimize_native(model, n_layer=config.n_layer, tanh_gelu=config.activation_function == "gelu_new")
    steps.next("writing the weights")
    ir.save(model, folder / File.MODEL)
    onnx.checker.check_model(folder / File.MODEL)
    (folder / File.CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / File.GENERATION_CONFIG).write_text(
        json.dumps(loaded.generation_config, indent=2) + "\n", encoding="utf-8"
    )
    for name, text in loaded.tokenizer_files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    inputs, outputs = native_tensors_of(config)
    graph = GraphSpec(
        role=Role.DECODER,
        file=File.MODEL,
        flavour=Flavour.NATIVE,
        target=Target.CPU,
        cache=CacheSpec(kind=CacheKind.FIXED, dtype=DType.FLOAT32, head_dim=padded_head_dim(config.head_dim)),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )
    names = [File.MODEL, File.CONFIG, File.GENERATION_CONFIG, *loaded.tokenizer_files]
    return Manifest(
        graphs=(graph,),
        precision=Precision(dtype=DType.FLOAT32, recipe="none", promise={Key.KIND: Promise.EXACT}),
        source=loaded.source,
        files=describe_files(folder, names),
        minimum_onnxruntime=MINIMUM_ONNXRUNTIME,
        masked_tokens=config.vocab_size - loaded.tokenizer_vocab_size,
    )


def _verify(folder: Path, manifest: Manifest, loaded: Checkpoint, steps: _Steps) -> tuple[Check, ...]:
    """Open what was written as the runtime will, and compare it with PyTorch. Raises ExportError where they differ."""
    config = ModelConfig.from_dict(loaded.gpt.config.to_dict())
    bundle = Bundle(path=folder, manifest=manifest, config=config, generation_config=loaded.generation_config)
    steps.next("opening the graph in ONNX Runtime")
    engine = Engine(open_session(bundle, device=Target.CPU), config, masked_tokens=manifest.masked_tokens)
    checks = verify(engine, loaded.gpt, on_check=lambda name: steps.next(f"comparing with PyTorch: {name}"))
    failed = [
        f"{check.name}: logits differ by {check.max_abs_diff:.3g} (accepted: {check.tolerance:.3g}), "
        f"{check.argmax_differing} of {check.argmax_compared} winners differ"
        for check in checks
        if not check.passed
    ]
    if failed:
        raise ExportError("the exported graph does not compute what PyTorch does: " + "; ".join(failed))
    return checks


def _check_target(out: Path, *, force: bool) -> None:
    """Raise FileExistsError unless `out` is free, or is a bundle and nothing more, which `force` may replace."""
    refuse_existing(out, replace=force)
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()}
    if File.MANIFEST not in names:
        raise FileExistsError(
            f"{out} is no bundle (it has no {File.MANIFEST}), so it is not replaced; choose another name"
        )
    foreign = sorted(name for name in names if not is_bundle_name(name))
    if foreign:
        raise FileExistsError(f"{out} also holds {', '.join(foreign)}, which would be lost; move it elsewhere first")


class _Steps:
    """Counts the steps of an export as they begin; loading, already done, is the first of them."""

    def __init__(self, on_progress: Callable[[Progress], None], checks: int) -> None:
        self._on_progress = on_progress
        self._begun = 1
        self._total = 6 + checks

    def next(self, activity: str) -> None:
        self._on_progress(Progress(activity, self._begun, self._total))
        self._begun += 1

    def finish(self) -> None:
        self._on_progress(Progress("done", self._total, self._total))
