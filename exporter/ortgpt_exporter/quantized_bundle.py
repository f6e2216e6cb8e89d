"""From a float32 bundle to a quantised one that carries the evidence, or to nothing where it is not good enough."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx_ir as ir

import ortgpt
from ortgpt.bundle import Bundle, describe_files, open_bundle
from ortgpt.contract import DType, File, Flavour, Key, Promise, Target
from ortgpt.cpus import cpu_features
from ortgpt.engine import Engine
from ortgpt.errors import OptionError
from ortgpt.generator import Generator
from ortgpt.manifest import Evidence, Manifest, Precision
from ortgpt.session import Device, open_graph
from ortgpt_exporter.bundle_folder import check_target, save_graph, weight_bytes
from ortgpt_exporter.errors import ExportError
from ortgpt_exporter.evidence import (
    Independence,
    Likeness,
    compare,
    measure_independence,
    measure_speed,
    sample_rows,
    split_rows,
)
from ortgpt_exporter.quantize import (
    BITS,
    Recipe,
    Report,
    expected_matrices,
    make_recipe,
    matrix_widths,
    quantize_graph,
)
from ortgpt_exporter.steps import OnProgress, Steps
from ortgpt_exporter.verify import rounded
from ortgpt_models.folder import write_folder

_MOST_RATIO = {DType.INT8: 1.01, DType.INT4: 1.05}
_WIDENED = (4, 2)  # after a failed gate in 4 bits, one in so many matrices gets 8 bits: first a quarter, then half
_COPIED = (File.CONFIG, File.GENERATION_CONFIG, File.VOCAB, File.MERGES)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What is asked for; None is chosen (see quantize.make_recipe). `eval_text` is a UTF-8 file to measure on.

    By default 2,048 tokens drawn from the float32 model itself are. The gate: the bundle is written only if the
    ratio of perplexities, and the mean KL divergence in nats where given, are no more than these.
    """

    dtype: str
    method: str | None = None
    block_size: int | None = None
    head_dtype: str | None = None
    eval_text: Path | None = None
    max_perplexity_ratio: float | None = None
    max_kl: float | None = None

    @property
    def most_ratio(self) -> float:
        return _MOST_RATIO[self.dtype] if self.max_perplexity_ratio is None else self.max_perplexity_ratio


def quantize_bundle(
    bundle: str | Path,
    out: str | Path,
    quantization: Quantization,
    *,
    external_data: bool = False,
    force: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> Bundle:
    """Quantise a native float32 bundle into the folder `out`, measure both, and return the new one opened.

    Weights of more than 1.5 GB, or any with `external_data`, get a file of their own. Where 4 bits fail the gate, the
    matrices that rounding changed most get 8, up to half of them. Raises ExportError for a bundle of another kind, a
    recipe that does not fit or a gate that fails; OptionError, BundleError, FileExistsError or another OSError.
    """
    check_quantization(quantization)
    source, out = open_bundle(bundle), Path(os.path.abspath(out))
    check_source(source)
    check_target(out, force=force)
    with write_folder(out, replace=force) as folder, ortgpt.load(source.path, device=Target.CPU) as generator:
        recipe = recipe_for(source, quantization)  # after the bundle was found intact
        name, rows, size_bytes = eval_rows(generator, quantization.eval_text)
        steps = Steps(on_progress, len(rows) + 4)
        candidate, recipe, report, likeness = _attempt(
            generator, folder, quantization, recipe, rows, steps, external_data
        )
        steps.next("measuring independence")
        independence = measure_independence(candidate, rows)
        steps.next("measuring speed")
        evidence = _evidence(generator.engine, candidate, folder, report, likeness, name, size_bytes)
        steps.next("writing the manifest")
        manifest = _manifest(source, folder, recipe, independence, evidence)
        (folder / File.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        open_bundle(folder)
    steps.finish()
    return open_bundle(out)


def check_quantization(quantization: Quantization) -> None:
    """Raise OptionError naming every value that is not accepted."""
    faults = [
        f"{name} = {value!r} (accepted: a number above {least})"
        for name, value, least in (
            ("max_perplexity_ratio", quantization.max_perplexity_ratio, 1),
            ("max_kl", quantization.max_kl, 0),
        )
        if value is not None and not value > least
    ]
    if quantization.dtype not in BITS:
        faults.insert(0, f"dtype = {quantization.dtype!r} (accepted: {', '.join(BITS)})")
    if faults:
        raise OptionError("; ".join(faults))


def check_source(source: Bundle) -> None:
    """Raise ExportError unless a bundle is one to quantise."""
    graph = source.manifest.graphs[0]
    found = source.manifest.precision.dtype, graph.flavour
    cache_dtype = None if graph.cache is None else graph.cache.dtype
    if (*found, cache_dtype) != (DType.FLOAT32, Flavour.NATIVE, DType.FLOAT32):
        raise ExportError(
            f"{source.path} is {' and '.join(found)} (accepted: float32 and native); export the checkpoint anew, or "
            "name the bundle that this one was made of"
        )


def recipe_for(source: Bundle, asked: Quantization) -> Recipe:
    """Return the recipe asked for. Raises ExportError where it does not fit the matrices of the bundle."""
    widths = matrix_widths(ir.load(source.path / File.MODEL))
    missing = expected_matrices(source.config.n_layer) - widths.keys()
    if missing:
        raise ExportError(
            f"{source.path / File.MODEL} has no float32 matrix {min(missing)} ({len(missing)} are missing); export the "
            "checkpoint anew"
        )
    return make_recipe(
        widths,
        dtype=asked.dtype,
        method=asked.method,
        block_size=asked.block_size,
        head_dtype=asked.head_dtype,
    )


def eval_rows(generator: Generator, path: Path | None) -> tuple[str, list[list[int]], int]:
    """Return the name of the text to measure on, its rows of ids, and its size in bytes."""
    start_id = generator.start_id
    if path is None:
        rows = sample_rows(generator.engine, start_id)
        ids = [token_id for row in rows for token_id in row[1:]]
        return "drawn from the float32 model", rows, sum(len(generator.tokenizer.token_bytes(i)) for i in ids)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text: {error}; convert it first") from None
    ids = generator.tokenizer.encode(text)
    if not ids:
        raise ExportError(f"{path} is empty; name a text to measure on")
    return path.name, split_rows(ids, start_id, generator.engine.config.n_positions), len(text.encode())


def _attempt(
    generator: Generator,
    folder: Path,
    asked: Quantization,
    recipe: Recipe,
    rows: list[list[int]],
    steps: Steps,
    external_data: bool,
) -> tuple[Engine, Recipe, Report, Likeness]:
    """Quantise and measure; in 4 bits, widen the most sensitive matrices as long as the gate fails."""
    parts = [0, *_WIDENED] if asked.dtype == DType.INT4 else [0]
    steps.next(f"rounding to {asked.dtype}")
    for place, part in enumerate(parts):
        candidate, report = open_quantized(generator.bundle, folder, recipe, external_data=external_data)
        likeness = compare(
            generator.engine, candidate, rows, on_row=(lambda: steps.next("measuring")) if part == 0 else lambda: None
        )
        if _passes(likeness, asked):
            return candidate, recipe, report, likeness
        if place + 1 < len(parts):
            recipe = replace(recipe, wider=_most_sensitive(report, parts[place + 1]))
    raise ExportError(
        f"the {asked.dtype} bundle fails its gate: perplexity ratio {likeness.perplexity_ratio:.4f} (accepted: "
        f"{asked.most_ratio:g}), KL {likeness.kl:.4f} (accepted: {'any' if asked.max_kl is None else asked.max_kl}) "
        f"over {likeness.tokens:,} tokens"
        + (f", with {len(recipe.wider)} matrices in 8 bits" if recipe.wider else "")
        + "; try a smaller block size, head_dtype int8, int8, or a wider gate"
    )


def _passes(likeness: Likeness, asked: Quantization) -> bool:
    return likeness.perplexity_ratio <= asked.most_ratio and (asked.max_kl is None or likeness.kl <= asked.max_kl)


def _most_sensitive(report: Report, part: int) -> tuple[str, ...]:
    """Return the matrices of the layers that rounding changed most, one in `part`."""
    layers = sorted((name for name in report.errors if name.startswith("h.")), key=report.errors.__getitem__)
    return tuple(sorted(layers[-(-len(layers) * (part - 1) // part) :]))


def open_quantized(
    source: Bundle, folder: Path, recipe: Recipe, *, external_data: bool = False
) -> tuple[Engine, Report]:
    """Write all files of a quantised bundle but its manifest into `folder`, in place of what is there, and open it."""
    model = ir.load(source.path / File.MODEL)
    report = quantize_graph(model, recipe, n_layer=source.config.n_layer)
    ir.external_data.load_to_model(model)  # what was not quantised may lie in the source's own file of weights
    for path in folder.iterdir():
        path.unlink()
    save_graph(model, folder, external_data=external_data)
    for name in _COPIED:
        shutil.copyfile(source.path / name, folder / name)
    draft = replace(source, path=folder)
    session = open_graph(draft, source.manifest.graphs[0], Device(Target.CPU))
    return Engine(session, source.config, masked_tokens=source.manifest.masked_tokens), report


def _evidence(
    baseline: Engine, candidate: Engine, folder: Path, report: Report, likeness: Likeness, name: str, size_bytes: int
) -> Evidence:
    before, after = measure_speed([baseline, candidate])
    bits = 1 / (size_bytes * math.log(2))
    return Evidence(
        text=name,
        tokens=likeness.tokens,
        perplexity=rounded(likeness.perplexity),
        baseline_perplexity=rounded(likeness.baseline_perplexity),
        bits_per_byte=rounded(likeness.nll * bits),
        baseline_bits_per_byte=rounded(likeness.baseline_nll * bits),
        kl=rounded(likeness.kl),
        top1=rounded(likeness.top1),
        top5=rounded(likeness.top5),
        bytes_per_parameter=rounded(weight_bytes(ir.load(folder / File.MODEL)) / report.parameters),
        prefill_tokens_per_s=after.prefill,
        baseline_prefill_tokens_per_s=before.prefill,
        decode_tokens_per_s=after.decode,
        baseline_decode_tokens_per_s=before.decode,
        threads=candidate.session.threads,
        cpu_features=cpu_features(),
        matrices=report.quantized,
        left_out=report.kept,
    )


def _manifest(source: Bundle, folder: Path, recipe: Recipe, independence: Independence, evidence: Evidence) -> Manifest:
    promise: Mapping[str, object] = {
        Key.KIND: Promise.BOUNDED,
        Key.LOGIT_BOUND: independence.logit_bound,
        Key.BATCH_FLIPS: independence.batch_flips,
        Key.PIECE_FLIPS: independence.piece_flips,
        Key.STEP_FLIPS: independence.step_flips,
    }
    parameters = asdict(recipe)
    return replace(
        source.manifest,
        precision=Precision(
            dtype=str(parameters.pop(Key.DTYPE)), recipe="weight-blocks", parameters=parameters, promise=promise
        ),
        files=describe_files(folder, [path.name for path in folder.iterdir()]),
        verification=(),
        evidence=evidence,
    )
