"""What the commands show of a bundle, as values for JSON and as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import Agreement, Evidence, Promise
from ortgpt.contract import Norm, TokenizerKind

# What `ortgpt info` says of a tokenizer of another kind than GPT-2's.
_TOKENIZERS = {
    TokenizerKind.TOKENIZER_JSON: "tokenizer.json, which needs the package tokenizers",
    TokenizerKind.NONE: "none: calls take and give token ids",
}


def info_values(bundle: Bundle) -> dict[str, Any]:
    """Return what `ortgpt info --json` writes: task, model, precision, source, files, and how it was verified."""
    shape = {name: getattr(bundle.config, name) for name in ("n_layer", "n_head", "n_positions", "vocab_size")}
    values = dataclasses.asdict(bundle.manifest)
    sizes = {name: entry["size"] for name, entry in values.pop("files").items()}
    sums = {"size_bytes": sum(sizes.values()), "file_sizes_bytes": sizes}
    labels = {} if bundle.labels is None else dataclasses.asdict(bundle.labels)
    return {"path": str(bundle.path), "task": values.pop("task"), **labels, **shape, **values, **sums}


def info_lines(bundle: Bundle) -> list[str]:
    """Return what `ortgpt info` writes, a line for each fact."""
    manifest, config = bundle.manifest, bundle.config
    precision, source = manifest.precision, manifest.source
    parameters = ", ".join(f"{key} {_shown(value)}" for key, value in precision.parameters.items())
    head = "" if config.tie_word_embeddings else ", a head that is not the token embedding"
    norm = ", post-norm" if manifest.architecture.norm == Norm.POST else ""
    facts = {"bundle": str(bundle.path), "task": manifest.task}
    if bundle.labels is not None:
        details = (bundle.labels.finetuning_task, bundle.labels.problem_type.replace("_", " "))
        facts["task"] = ", ".join(filter(None, (manifest.task, *details)))
        facts["labels"] = f"{len(bundle.labels.labels):,} ({_some([*bundle.labels.labels])})"
    facts |= {
        "model": f"{config.n_layer} layers, {config.n_head} heads, context {config.n_positions:,}, "
        f"vocabulary {config.vocab_size:,} ({manifest.masked_tokens:,} masked){head}{norm}",
        "weights": f"{precision.dtype}, recipe {precision.recipe}{parameters and f' ({parameters})'}",
        "promises": _promise_text(precision.promise),
        "weights from": f"{source.id}, licence {source.licence or 'not stated'}",
        "weights sha256": source.sha256,
        "onnxruntime": f"{manifest.minimum_onnxruntime} or newer",
        "size in bytes": f"{sum(entry.size for entry in manifest.files.values()):,}",
    }
    if manifest.tokenizer.kind in _TOKENIZERS:
        facts["tokenizer"] = _TOKENIZERS[manifest.tokenizer.kind]
    facts |= {f"  {name}": f"{entry.size:,}" for name, entry in manifest.files.items()}
    facts |= {f"graph {graph.file}": str(graph) for graph in manifest.graphs}
    for check in manifest.verification:
        difference = f"logits within {check.max_abs_diff:.1e} of PyTorch (accepted {check.tolerance:.1e})"
        facts[f"verified: {check.name}"] = difference
    width = max(map(len, facts)) + 2
    lines = [f"{name:<{width}}{value}" for name, value in facts.items()]
    lines += [] if manifest.evidence is None else evidence_lines(manifest.evidence)
    return lines + ([] if manifest.agreement is None else agreement_lines(manifest.agreement))


def evidence_lines(evidence: Evidence) -> list[str]:
    """Return the measurements of a quantised bundle as a table."""
    ratio = f"{evidence.perplexity_ratio:.4f}x"
    rows = [
        (f"on {evidence.tokens:,} tokens, {evidence.text}", "this", "float32", ""),
        ("perplexity", f"{evidence.perplexity:.3f}", f"{evidence.baseline_perplexity:.3f}", ratio),
        *(
            [("bits per byte", f"{evidence.bits_per_byte:.4f}", f"{evidence.baseline_bits_per_byte:.4f}", "")]
            if evidence.bits_per_byte is not None
            else []
        ),
        ("KL divergence, nats", f"{evidence.kl:.5f}", "", ""),
        ("same best token", f"{100 * evidence.top1:.1f}%", "", ""),
        ("same five best", f"{100 * evidence.top5:.1f}%", "", ""),
        ("bytes per parameter", f"{evidence.bytes_per_parameter:.3f}", "4.000", ""),
        *(
            (f"{what}, tokens/s", f"{this:,.0f}", f"{baseline:,.0f}", f"{this / baseline:.2f}x")
            for what, this, baseline in (
                ("prefill", evidence.prefill_tokens_per_s, evidence.baseline_prefill_tokens_per_s),
                ("decode", evidence.decode_tokens_per_s, evidence.baseline_decode_tokens_per_s),
            )
        ),
    ]
    return _table(rows) + _quantized_lines(evidence)


def agreement_lines(agreement: Agreement) -> list[str]:
    """Return the measurements of a quantised classifier as a table."""
    this, baseline = agreement.tokens_per_s, agreement.baseline_tokens_per_s
    rows = [(f"on {agreement.texts:,} texts, {agreement.text}", "this", "float32", "")]
    if agreement.kl is not None and agreement.same_labels is not None:
        rows.append(("KL divergence, nats", f"{agreement.kl:.5f}", "", ""))
        rows.append(("same labels", f"{100 * agreement.same_labels:.1f}%", "", ""))
    rows += [
        ("largest difference of logits", f"{agreement.max_abs_diff:.4f}", "", ""),
        ("bytes per parameter", f"{agreement.bytes_per_parameter:.3f}", "4.000", ""),
        ("tokens/s", f"{this:,.0f}", f"{baseline:,.0f}", f"{this / baseline:.2f}x"),
    ]
    return _table(rows) + _quantized_lines(agreement)


def _table(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    return [f"{what:<48}{this:>10}{baseline:>10}{ratio:>10}".rstrip() for what, this, baseline, ratio in rows]


def _quantized_lines(found: Evidence | Agreement) -> list[str]:
    """Return what became of the matrices, and what the speeds were measured with."""
    matrices = ", ".join(f"{count} in {dtype}" for dtype, count in found.matrices.items())
    names_of: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        names_of.setdefault(reason, []).append(name)
    left_out = "; ".join(f"{_some(names)} ({reason})" for reason, names in names_of.items()) or "none"
    return [
        f"matrices: {matrices}; left out: {left_out}",
        f"measured with {found.threads} threads, CPU with {' '.join(found.cpu_features) or 'unknown features'}",
    ]


def _promise_text(promise: Promise) -> str:
    """Say what a precision promises of a token that is not computed alone and one a step."""
    kind = promise.kind.replace("_", " ")
    if promise.relative_logit_bound is not None:
        return f"{kind}: a logit moves by at most {promise.relative_logit_bound} of the largest"
    if promise.logit_bound is None:
        return kind
    changes = {
        "in a batch": promise.argmax_changes_in_batch,
        "beside a row of outliers": promise.argmax_changes_beside_outliers,
        "in a whole prefill": promise.argmax_changes_in_prefill,
        "in steps of four": promise.argmax_changes_in_steps_of_four,
    }
    changed = ", ".join(f"{count:.1f} {where}" for where, count in changes.items() if count is not None)
    moved = f"{kind}: a logit moves by at most {promise.logit_bound:.2g}"
    return f"{moved}; best tokens changed of 1,000: {changed}" if changed else moved


def diagnosis_lines(diagnosis: Any) -> list[str]:
    """Return what `ortgpt doctor` found, a line for each fact, faults last."""
    facts = dataclasses.asdict(diagnosis)
    faults = facts.pop("faults")
    facts |= {
        "packages": [f"{name} {version or 'absent'}" for name, version in diagnosis.packages.items()],
        "memory_bytes": _gib(diagnosis.memory_bytes),
        "memory_available_bytes": _gib(diagnosis.memory_available_bytes),
        "self_test_s": "not passed" if diagnosis.self_test_s is None else f"passed in {diagnosis.self_test_s:.2f} s",
    }
    labels = {name: name.removesuffix("_bytes").removesuffix("_s").replace("_", " ") for name in facts}
    lines = [f"{labels[name]:<22}{_known(value)}" for name, value in facts.items()]
    return [*lines, *(f"FAULT: {fault}" for fault in faults)]


def _gib(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def _known(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return _some([str(each) for each in value]) or "none"
    return " ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _some(names: list[str]) -> str:
    """Join names with commas; of more than four, show two and how many more there are."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"
