"""Export a checkpoint into a bundle folder: every step in order, whole or absent."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from ortgpt.bundle.folder import Bundle, describe_files, open_bundle
from ortgpt.bundle.manifest import (
    Architecture,
    CacheSpec,
    Check,
    Format,
    GraphSpec,
    Manifest,
    Precision,
    Promise,
    TokenizerSpec,
)
from ortgpt.bundle.model_config import ModelConfig
from ortgpt.contract import (
    CACHE_KINDS,
    MINIMUM_ONNXRUNTIME,
    DType,
    File,
    Flavour,
    Norm,
    PromiseKind,
    RecipeName,
    Role,
    Target,
    Task,
    TokenizerKind,
    topk_tensors,
)
from ortgpt.engine.device_topk import open_device_topk
from ortgpt.engine.engine import Engine
from ortgpt.errors import OptionError
from ortgpt.ort.device import Device
from ortgpt.ort.session import open_graph
from ortgpt_exporter.checkpoint.hub import DownloadProgress
from ortgpt_exporter.checkpoint.load import Checkpoint, load_checkpoint
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.verify import TOLERANCES, check_names, verify, verify_selector
from ortgpt_exporter.graph.fusions import optimize_graph
from ortgpt_exporter.graph.save import save_graph
from ortgpt_exporter.graph.to_onnx import cache_head_dim, export_graph, tensors_of
from ortgpt_exporter.graph.topk_graph import select_graph
from ortgpt_exporter.portable_files import portable_files
from ortgpt_exporter.progress import OnProgress, Progress, Steps
from ortgpt_exporter.quantization.recipe import BITS
from ortgpt_exporter.quantization.request import Quantization, check_quantization
from ortgpt_exporter.quantize import quantize_bundle
from ortgpt_exporter.target_folder import check_target
from ortgpt_models import GPTConfig
from ortgpt_models.atomic_folder import scratch_folder, write_folder

# The types that each flavour can be written in for each device, the default first. A portable graph computes shapes
# on the CPU, so it never runs whole on a GPU; other runtimes take such graphs there all the same.
DTYPES = {
    (Flavour.NATIVE, Target.CPU): (DType.FLOAT32, DType.FLOAT16, *BITS),
    (Flavour.NATIVE, Target.CUDA): (DType.FLOAT16,),
    (Flavour.PORTABLE, Target.CPU): (DType.FLOAT32, DType.FLOAT16, *BITS),
}
_logger = logging.getLogger("ortgpt_exporter")


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """What a checkpoint is exported to. Raises OptionError for a combination that does not exist."""

    flavour: str
    target: str
    dtype: str
    external_data: bool

    @classmethod
    def make(cls, *, flavour: str, target: str, dtype: str | None, external_data: bool) -> ExportFormat:
        accepted = DTYPES.get((flavour, target))
        if accepted is None:
            shown = "; ".join(" for ".join(pair) for pair in DTYPES)
            raise OptionError(f"flavour = {flavour!r} with target = {target!r} (accepted: {shown})")
        if dtype is not None and dtype not in accepted:
            raise OptionError(f"dtype = {dtype!r} with {flavour} for {target} (accepted: {', '.join(accepted)})")
        return cls(flavour=flavour, target=target, dtype=dtype or accepted[0], external_data=external_data)

    @property
    def promise(self) -> Promise:
        """What decoding in this precision promises, as the manifest states it."""
        if self.dtype == DType.FLOAT32:
            return Promise(kind=PromiseKind.EXACT)
        return Promise(kind=PromiseKind.BOUNDED, relative_logit_bound=TOLERANCES[self.dtype])


def export_bundle(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    flavour: str = Flavour.NATIVE,
    target: str = Target.CPU,
    tokenizer: str | Path | None = None,
    adapter: str | Path | None = None,
    revision: str | None = None,
    activation: str | None = None,
    external_data: bool = False,
    quantization: Quantization | None = None,
    force: bool = False,
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = _logger.warning,
) -> Bundle:
    """Export a checkpoint (see load_checkpoint) to the bundle folder `out` and return it opened.

    `flavour` is "native" or "portable", `target` "cpu" or "cuda" (native only), `dtype` "float32", "float16" (by
    default what the target wants), "int8" or "int4"; these two go by way of a float32 bundle that does not stay, and
    `quantization` says how (see quantize_bundle). The weights get a file of their own in a native bundle; in a
    portable one only those of more than 1.5 GB, or any with `external_data`. `tokenizer`, `adapter`, `revision` and
    `activation` are those of load_checkpoint(). The graph is compared with PyTorch before anything appears at `out`.
    `force` replaces a bundle that is already there, and nothing else. `on_note` gets facts about the checkpoint worth
    telling, a line each. Raises ModelError, ExportError, BundleError (a damaged tokenizer), OptionError,
    FileExistsError or another OSError.
    """
    form = ExportFormat.make(flavour=flavour, target=target, dtype=dtype, external_data=external_data)
    out = Path(os.path.abspath(out))
    check_target(out, force=force)
    if quantization is not None and quantization.dtype != form.dtype:
        raise OptionError(f"quantization.dtype = {quantization.dtype!r} with dtype {form.dtype!r} (accepted: the same)")
    if form.dtype in BITS:
        quantization = Quantization(dtype=form.dtype) if quantization is None else quantization
        check_quantization(quantization, form.flavour)
        with scratch_folder(out) as folder:
            whole = export_bundle(
                checkpoint,
                folder / "float32",
                flavour=form.flavour,
                tokenizer=tokenizer,
                adapter=adapter,
                revision=revision,
                activation=activation,
                on_progress=on_progress,
                on_note=on_note,
            )
            return quantize_bundle(
                whole.path, out, quantization, external_data=external_data, force=force, on_progress=on_progress
            )
    on_progress(Progress("loading the checkpoint", 0, 1))
    loaded = load_checkpoint(
        checkpoint,
        tokenizer=tokenizer,
        adapter=adapter,
        revision=revision,
        activation=activation,
        on_download=lambda download: on_progress(_downloading(download)),
    )
    for note in loaded.notes:
        on_note(note)
    steps = Steps(on_progress, 6 + len(check_names(loaded.gpt.config.n_positions)), begun=1)  # it is loaded
    with write_folder(out, replace=force) as folder:
        manifest = _write(loaded, form, folder, steps)
        checks = _verify(folder, manifest, loaded, steps)
        steps.next("writing the manifest")
        manifest = replace(manifest, verification=checks)
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        open_bundle(folder)
    steps.finish()
    return open_bundle(out)


def _downloading(download: DownloadProgress) -> Progress:
    done, total = download.done_bytes, download.total_bytes or download.done_bytes
    return Progress(f"downloading {download.repo_id}, {total / 1e6:,.1f} MB", done, max(total, 1))


def _write(loaded: Checkpoint, form: ExportFormat, folder: Path, steps: Steps) -> Manifest:
    """Write every file but the manifest; return the manifest without its verification."""
    config = loaded.gpt.config
    _write_graph(loaded, form, folder, steps)
    texts = {
        File.CONFIG: json.dumps(config.to_dict(), indent=2) + "\n",
        File.GENERATION_CONFIG: json.dumps(loaded.generation_config, indent=2) + "\n",
        **loaded.tokenizer_files.texts,
    }
    if form.flavour == Flavour.PORTABLE:
        texts |= portable_files(config, loaded.tokenizer_files)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    allowed = loaded.tokenizer_files.tokenizer.vocab_size
    graphs = [_decoder(config, form)]
    if form.target != Target.CPU:
        graphs.append(_selector(config, form, allowed))
        onnx.save(select_graph(config.vocab_size, allowed), folder / File.SELECT)
    return Manifest(
        format=Format(),
        task=Task.TEXT_GENERATION,
        architecture=Architecture(norm=Norm.PRE),
        tokenizer=TokenizerSpec(kind=TokenizerKind.BYTE_LEVEL_BPE),
        graphs=tuple(graphs),
        precision=Precision(dtype=form.dtype, recipe=RecipeName.NONE, parameters={}, promise=form.promise),
        source=loaded.source,
        files=describe_files(folder, [path.name for path in folder.iterdir()]),
        minimum_onnxruntime=MINIMUM_ONNXRUNTIME,
        masked_tokens=config.vocab_size - allowed,
        verification=(),
    )


def _decoder(config: GPTConfig, form: ExportFormat) -> GraphSpec:
    inputs, outputs = tensors_of(config, form.flavour, form.dtype)
    head_dim = cache_head_dim(config, form.flavour)
    return GraphSpec(
        role=Role.DECODER,
        file=File.MODEL,
        flavour=form.flavour,
        target=form.target,
        cache=CacheSpec(kind=CACHE_KINDS[form.flavour], dtype=form.dtype, head_dim=head_dim),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def _selector(config: GPTConfig, form: ExportFormat, allowed_vocab_size: int) -> GraphSpec:
    inputs, outputs = topk_tensors(config.vocab_size, allowed_vocab_size)
    return GraphSpec(
        role=Role.SELECTOR,
        file=File.SELECT,
        flavour=form.flavour,
        target=form.target,
        cache=None,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def _write_graph(loaded: Checkpoint, form: ExportFormat, folder: Path, steps: Steps) -> None:
    """Write the graph, its weights beside it where they are large or that is asked for."""
    steps.next("exporting the graph")
    model = export_graph(loaded.gpt, form.flavour, form.dtype)
    steps.next("optimising the graph")
    optimize_graph(model, loaded.gpt.config, form.flavour, form.dtype)
    steps.next("writing the weights")
    save_graph(model, folder, form.flavour, external_data=form.external_data)


def _verify(folder: Path, manifest: Manifest, loaded: Checkpoint, steps: Steps) -> tuple[Check, ...]:
    """Open what was written as the runtime will, and compare it with PyTorch. Raises ExportError where they differ.

    A graph for a GPU is opened on the CPU, whose kernels compute the same operators.
    """
    config = ModelConfig.from_dict(loaded.gpt.config.to_dict())
    bundle = Bundle(path=folder, manifest=manifest, config=config, generation_config=loaded.generation_config)
    steps.next("opening the graph in ONNX Runtime")
    session = open_graph(bundle, manifest.graphs[0], Device(Target.CPU))
    engine = Engine(session, config, masked_tokens=manifest.masked_tokens)
    selector = open_device_topk(bundle, session)
    if selector is not None:
        verify_selector(selector, config.vocab_size)
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
