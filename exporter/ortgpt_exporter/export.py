"""Export a checkpoint into a bundle folder: load, convert, verify, write. The folder appears whole or not at all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from ortgpt.bundle.folder import Bundle, describe_files, open_bundle
from ortgpt.bundle.label_config import LabelConfig
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
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MINIMUM_ONNXRUNTIME,
    DType,
    File,
    Flavour,
    PromiseKind,
    RecipeName,
    Role,
    Target,
    Task,
    topk_tensors,
)
from ortgpt.engine.device_topk import open_device_topk
from ortgpt.errors import OptionError, shown
from ortgpt_exporter.checkpoint.load import Checkpoint, CheckpointSource, load_checkpoint
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evaluation.verify import TOLERANCES, check_count, verify, verify_device_topk
from ortgpt_exporter.evaluation.verify_classifier import classifier_check_count, verify_classifier
from ortgpt_exporter.graph.fusions import optimize_graph
from ortgpt_exporter.graph.save import save_graph
from ortgpt_exporter.graph.to_onnx import (
    cache_head_dim,
    classifier_tensors_of,
    export_classifier,
    export_graph,
    task_of,
    tensors_of,
)
from ortgpt_exporter.graph.topk_graph import topk_graph
from ortgpt_exporter.portable_files import portable_files
from ortgpt_exporter.progress import Steps
from ortgpt_exporter.quantization.request import BITS, Quantization, check_quantization, check_type
from ortgpt_exporter.quantization.write import open_classifier, open_engine
from ortgpt_exporter.quantize import quantize_opened
from ortgpt_exporter.target_folder import check_target
from ortgpt_models.atomic_folder import scratch_folder, write_folder
from ortgpt_models.progress import OnProgress, Progress

# The dtypes of each flavour for each device, the default first. A portable graph computes shapes on the CPU, so it does
# not run whole on a GPU, as this runtime requires; other runtimes accept such graphs.
DTYPES = {
    (Flavour.NATIVE, Target.CPU): (DType.FLOAT32, DType.FLOAT16, *BITS),
    (Flavour.NATIVE, Target.CUDA): (DType.FLOAT16,),
    (Flavour.PORTABLE, Target.CPU): (DType.FLOAT32, DType.FLOAT16, *BITS),
}
# Bytes that a weight of the head takes, with its part of the scales in blocks of the default sizes.
_HEAD_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.INT8: 1 + 4 / 64, DType.INT4: 1 / 2 + 4 / 32}
_logger = logging.getLogger("ortgpt_exporter")


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """What a checkpoint is exported to. Raises OptionError for a combination that does not exist."""

    flavour: str = Flavour.NATIVE
    """ "native" or "portable"."""
    target: str = Target.CPU
    """The device to run on: "cpu" or "cuda"."""
    dtype: str = ""
    """ "float32", "float16", "int8" or "int4"; by default the first that flavour and target accept."""
    external_data: bool = False
    """Whether a portable graph's weights get a file of their own even if they are small."""

    def __post_init__(self) -> None:
        accepted = DTYPES.get((self.flavour, self.target))
        if accepted is None:
            raise OptionError(
                "{flavour} with {target} (accepted: {accepted})",
                {"flavour": self.flavour, "target": self.target},
                accepted="; ".join(" for ".join(pair) for pair in DTYPES),
            )
        if self.dtype and self.dtype not in accepted:
            raise OptionError(
                "{dtype} with {form} (accepted: {accepted})",
                {"dtype": self.dtype},
                form=f"{self.flavour} for {self.target}",
                accepted=", ".join(accepted),
            )
        object.__setattr__(self, "dtype", self.dtype or accepted[0])

    @property
    def promise(self) -> Promise:
        """What decoding in this precision promises, for the manifest."""
        if self.dtype == DType.FLOAT32:
            return Promise(kind=PromiseKind.EXACT)
        return Promise(kind=PromiseKind.BOUNDED, relative_logit_bound=TOLERANCES[self.dtype])


def export_bundle(
    checkpoint: str | Path | CheckpointSource,
    out: str | Path,
    *,
    dtype: str | None = None,
    flavour: str = Flavour.NATIVE,
    target: str = Target.CPU,
    external_data: bool = False,
    quantization: Quantization | None = None,
    force: bool = False,
    on_progress: OnProgress = lambda progress: None,
    on_note: Callable[[str], None] = _logger.warning,
) -> Bundle:
    """Export a checkpoint to the bundle folder `out`, compare it with PyTorch, and return the bundle opened.

    `checkpoint` is a Hugging Face folder, a nanoGPT file, a hub id, "austen", or a CheckpointSource, which also names a
    tokenizer, an adapter, a revision or an activation. `flavour` is "native" or "portable"; `target` is "cpu" or "cuda"
    (native only). `dtype` is "float32" (the default for cpu), "float16" (for cuda), "int8" or "int4"; for the last two,
    `quantization` says how (see quantize_bundle). Weights get a file of their own in a native bundle, and in a portable
    one if they exceed 1.5 GB or with `external_data`. `force` replaces a bundle at `out`, and nothing else. `on_note`
    gets remarks on the checkpoint, one line each. If the graph does not compute what PyTorch computes, nothing is
    written. Raises ExportError, BundleError (a damaged tokenizer), OptionError, FileExistsError or another OSError.
    """
    source = checkpoint if isinstance(checkpoint, CheckpointSource) else CheckpointSource(checkpoint)
    export_format = ExportFormat(flavour=flavour, target=target, dtype=dtype or "", external_data=external_data)
    out = Path(os.path.abspath(out))
    check_target(out, force=force)
    if quantization is not None and check_type(quantization).dtype != export_format.dtype:
        raise OptionError(
            f"quantization.dtype = {shown(quantization.dtype)} with dtype {export_format.dtype!r} (accepted: the same)"
        )
    if export_format.dtype not in BITS:
        return _export(source, out, export_format, export_format.dtype, force, on_progress, on_note)
    quantization = quantization or Quantization(dtype=export_format.dtype)
    check_quantization(quantization, flavour)
    float32 = replace(export_format, dtype=DType.FLOAT32, external_data=False)
    with scratch_folder(out) as folder:
        head_dtype = quantization.head_dtype or quantization.dtype
        bundle = _export(source, folder / "float32", float32, head_dtype, False, on_progress, on_note)
        return quantize_opened(
            bundle, out, quantization, external_data=external_data, force=force, on_progress=on_progress
        )


def _export(
    source: CheckpointSource,
    out: Path,
    export_format: ExportFormat,
    head_dtype: str,
    force: bool,
    on_progress: OnProgress,
    on_note: Callable[[str], None],
) -> Bundle:
    """Write a bundle in float32 or float16, and return it opened; `head_dtype` is what the head becomes in the end."""
    on_progress(Progress("loading the checkpoint", 0, 1))
    checkpoint = load_checkpoint(source, on_progress=on_progress)
    config, classifier = checkpoint.gpt.config, checkpoint.classifier
    if classifier is not None and export_format.target != Target.CPU:
        raise ExportError(
            f"{source.name} is a classifier ({classifier.config.architecture}), and target = {export_format.target!r} "
            f"is for language models so far (accepted: {Target.CPU})"
        )
    for note in checkpoint.notes:
        on_note(note)
    if not config.tie_word_embeddings:
        megabytes = _HEAD_BYTES[head_dtype] * config.vocab_size * config.n_embd / 1e6
        on_note(
            "the head is not the token embedding; as a matrix of its own it adds about "
            f"{megabytes:,.2f} MB in {head_dtype}"
        )
    if classifier is None:
        checks = check_count(config.n_positions, export_format.flavour)
    else:
        checks = classifier_check_count(config.n_positions)
    steps = Steps(on_progress, 6 + checks, begun=1)  # after the loading
    with write_folder(out, replace=force) as folder:
        manifest = _write(checkpoint, export_format, folder, steps)
        manifest = replace(manifest, verification=_verify(folder, manifest, checkpoint, steps))
        steps.next("writing the manifest")
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
        bundle = open_bundle(folder)
    steps.finish()
    return replace(bundle, path=out, places={})


def _write(checkpoint: Checkpoint, export_format: ExportFormat, folder: Path, steps: Steps) -> Manifest:
    """Write every file but the manifest, and return the manifest without its verification."""
    config, flavour, dtype = checkpoint.gpt.config, export_format.flavour, export_format.dtype
    classifier = checkpoint.classifier
    steps.next("exporting the graph")
    if classifier is None:
        model = export_graph(checkpoint.gpt, flavour, dtype)
    else:
        model = export_classifier(classifier, flavour, dtype)
    steps.next("optimising the graph")
    optimize_graph(model, config, flavour, dtype)
    steps.next("writing the weights")
    save_graph(model, folder, flavour, external_data=export_format.external_data)
    del model
    for name, text in _texts(checkpoint, flavour).items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    allowed = checkpoint.tokenizer_files.tokenizer.vocab_size
    make = partial(GraphSpec, flavour=flavour, target=export_format.target)
    if classifier is None:
        cache = CacheSpec(kind=CACHE_KINDS[flavour], dtype=dtype, head_dim=cache_head_dim(config, flavour))
        inputs, outputs = map(tuple, tensors_of(config, flavour, dtype))
        graphs = [make(role=Role.DECODER, file=File.MODEL, cache=cache, inputs=inputs, outputs=outputs)]
    else:
        inputs, outputs = map(tuple, classifier_tensors_of(classifier.config))
        graphs = [make(role=Role.CLASSIFIER, file=File.MODEL, cache=None, inputs=inputs, outputs=outputs)]
    if export_format.target != Target.CPU:
        onnx.save(topk_graph(config.vocab_size, allowed), folder / File.SELECT)
        inputs, outputs = map(tuple, topk_tensors(config.vocab_size, allowed))
        graphs.append(make(role=Role.SELECTOR, file=File.SELECT, cache=None, inputs=inputs, outputs=outputs))
    return Manifest(
        format=Format(major=FORMAT_MAJOR, minor=FORMAT_MINOR),
        task=Task.TEXT_GENERATION if classifier is None else task_of(classifier.config),
        architecture=Architecture(norm=config.norm),
        tokenizer=TokenizerSpec(kind=checkpoint.tokenizer_files.kind, template=checkpoint.tokenizer_files.template),
        graphs=tuple(graphs),
        precision=Precision(dtype=dtype, recipe=RecipeName.NONE, parameters={}, promise=export_format.promise),
        source=checkpoint.source,
        files=describe_files(folder, [path.name for path in folder.iterdir()]),
        minimum_onnxruntime=MINIMUM_ONNXRUNTIME,
        masked_tokens=config.vocab_size - allowed,
        verification=(),
    )


def _texts(checkpoint: Checkpoint, flavour: str) -> dict[str, str]:
    """Return the text of each file of a bundle beside its graphs and its manifest, by the file's name."""
    config, classifier = checkpoint.gpt.config, checkpoint.classifier
    values = {File.CONFIG: config.to_dict() | ({} if classifier is None else classifier.config.to_dict())}
    if classifier is None:
        values[File.GENERATION_CONFIG] = dict(checkpoint.generation_config)
    texts = {name: json.dumps(each, indent=2) + "\n" for name, each in values.items()}
    texts |= checkpoint.tokenizer_files.texts
    if flavour == Flavour.PORTABLE:
        texts |= portable_files(config, checkpoint.tokenizer_files, generates=classifier is None)
    return texts


def _verify(folder: Path, manifest: Manifest, checkpoint: Checkpoint, steps: Steps) -> tuple[Check, ...]:
    """Open the written files as the runtime will, and compare them with PyTorch. Raises ExportError if they differ.

    A graph for a GPU is opened on the CPU, whose kernels compute the same operators.
    """
    config = ModelConfig.from_dict(checkpoint.gpt.config.to_dict())
    bundle = Bundle(path=folder, manifest=manifest, config=config, generation_config=checkpoint.generation_config)
    steps.next("opening the graph in ONNX Runtime")

    def on_check(name: str) -> None:
        steps.next(f"comparing with PyTorch: {name}")

    network = checkpoint.classifier
    if network is not None:
        labels = LabelConfig.from_dict(network.config.to_dict(), manifest.task)
        opened = open_classifier(replace(bundle, labels=labels), checkpoint.tokenizer_files.tokenizer)
        return _passed(verify_classifier(opened, network, manifest.precision.dtype, on_check=on_check))
    engine = open_engine(bundle)
    device_topk = open_device_topk(bundle, engine.session)
    if device_topk is not None:
        verify_device_topk(device_topk, config.vocab_size)
    return _passed(verify(engine, checkpoint.gpt, on_check=on_check))


def _passed(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Return the checks. Raises ExportError if one did not pass."""
    failed = [
        f"{check.name}: values differ by {check.max_abs_diff:.3g} (accepted: {check.tolerance:.3g}), "
        f"{check.argmax_differing} of {check.argmax_compared} largest ones differ"
        for check in checks
        if not check.passed
    ]
    if failed:
        raise ExportError("the exported graph does not compute what PyTorch does: " + "; ".join(failed))
    return checks
