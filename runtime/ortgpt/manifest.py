"""The manifest of a bundle, ortgpt.json, as dataclasses: read with every fault reported, written canonically.

Knows no files beyond their names in the manifest; `bundle` compares it with a folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ortgpt.contract import FORMAT_MAJOR, FORMAT_MINOR, Key, Norm, Task, TokenizerKind
from ortgpt.errors import BundleError
from ortgpt.json_reader import JsonReader
from ortgpt.messages import listed


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The key-value cache that a graph works on."""

    kind: str
    dtype: str
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """One ONNX graph of a bundle: what it computes, for which device, over which cache if any, with which tensors."""

    role: str
    file: str
    flavour: str
    target: str
    cache: CacheSpec | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of the weights, the recipe that made it, and what decoding in it promises (see ARCHITECTURE.md)."""

    dtype: str
    recipe: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    promise: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the weights came from; `sha256` is of the file of weights, or, of several, of their sha256s in order."""

    id: str
    sha256: str
    revision: str | None = None
    licence: str | None = None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest says of a file: `size` in bytes, and its sha256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of a graph with the PyTorch network it came from, over `positions` logit vectors.

    `argmax_compared` of them have a margin between the two best logits that makes the winner certain.
    """

    name: str
    positions: int
    max_abs_diff: float
    max_abs_logit: float
    tolerance: float
    argmax_compared: int
    argmax_differing: int

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance, and no certain winner another. A NaN is within none."""
        return self.max_abs_diff <= self.tolerance and self.argmax_differing == 0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a quantised bundle compares with the float32 one it was made of, over `tokens` of `text`.

    `kl` is KL(float32 ‖ quantised) in nats, a mean over tokens; `top1` and `top5` are fractions of agreement; speeds
    are tokens per second on a machine with these `cpu_features` and `threads`.
    """

    text: str
    tokens: int
    perplexity: float
    baseline_perplexity: float
    bits_per_byte: float
    baseline_bits_per_byte: float
    kl: float
    top1: float
    top5: float
    bytes_per_parameter: float
    prefill_tokens_per_s: float
    baseline_prefill_tokens_per_s: float
    decode_tokens_per_s: float
    baseline_decode_tokens_per_s: float
    threads: int
    cpu_features: tuple[str, ...]
    matrices: Mapping[str, int]
    left_out: Mapping[str, str]

    @property
    def perplexity_ratio(self) -> float:
        """How many times the float32 bundle's perplexity."""
        return self.perplexity / self.baseline_perplexity


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that ortgpt.json says. `masked_tokens` counts model rows beyond the tokenizer's vocabulary."""

    graphs: tuple[GraphSpec, ...]
    precision: Precision
    source: Source
    files: Mapping[str, FileEntry]
    minimum_onnxruntime: str
    masked_tokens: int = 0
    task: str = Task.TEXT_GENERATION
    norm: str = Norm.PRE
    tokenizer: str = TokenizerKind.BYTE_LEVEL_BPE
    verification: tuple[Check, ...] = ()
    evidence: Evidence | None = None
    major: int = FORMAT_MAJOR
    minor: int = FORMAT_MINOR

    def to_json(self) -> str:
        """Return the text of ortgpt.json, its own sha256 included."""
        return sealed_text(self._values(), self.files)

    def _values(self) -> dict[str, Any]:
        return {
            Key.FORMAT: {Key.MAJOR: self.major, Key.MINOR: self.minor},
            Key.TASK: self.task,
            Key.ARCHITECTURE: {Key.NORM: self.norm},
            Key.TOKENIZER: {Key.KIND: self.tokenizer},
            Key.GRAPHS: [_graph_values(graph) for graph in self.graphs],
            Key.PRECISION: {
                Key.DTYPE: self.precision.dtype,
                Key.RECIPE: self.precision.recipe,
                Key.PARAMETERS: dict(self.precision.parameters),
                Key.PROMISE: dict(self.precision.promise),
            },
            Key.SOURCE: {
                Key.ID: self.source.id,
                Key.REVISION: self.source.revision,
                Key.SHA256: self.source.sha256,
                Key.LICENCE: self.source.licence,
            },
            Key.MINIMUM_ONNXRUNTIME: self.minimum_onnxruntime,
            Key.MASKED_TOKENS: self.masked_tokens,
            Key.FILES: {},
            Key.VERIFICATION: [_check_values(check) for check in self.verification],
            Key.EVIDENCE: None if self.evidence is None else asdict(self.evidence),
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Manifest:
        """Read the parsed JSON of ortgpt.json.

        A newer major format is refused; unknown keys, which a newer minor may add, are ignored. Raises BundleError
        naming every fault.
        """
        reader = JsonReader(values)
        major = reader.integer(Key.FORMAT, Key.MAJOR)
        if major != FORMAT_MAJOR and not reader.faults:
            raise BundleError(
                f"bundle format {major} is not supported (accepted: {FORMAT_MAJOR}); "
                "use the version of ortgpt that wrote it, or export it anew"
            )
        manifest = cls(
            major=major,
            minor=reader.integer(Key.FORMAT, Key.MINOR),
            task=reader.choice((Task.TEXT_GENERATION,), Key.TASK),
            norm=reader.choice((Norm.PRE,), Key.ARCHITECTURE, Key.NORM),
            tokenizer=reader.choice((TokenizerKind.BYTE_LEVEL_BPE,), Key.TOKENIZER, Key.KIND),
            graphs=tuple(_read_graph(item) for item in reader.readers(Key.GRAPHS)),
            precision=Precision(
                dtype=reader.text(Key.PRECISION, Key.DTYPE),
                recipe=reader.text(Key.PRECISION, Key.RECIPE),
                parameters=reader.mapping(Key.PRECISION, Key.PARAMETERS),
                promise=_read_promise(reader),
            ),
            source=Source(
                id=reader.text(Key.SOURCE, Key.ID),
                revision=reader.optional_text(Key.SOURCE, Key.REVISION),
                sha256=reader.sha256(Key.SOURCE, Key.SHA256),
                licence=reader.optional_text(Key.SOURCE, Key.LICENCE),
            ),
            minimum_onnxruntime=reader.text(Key.MINIMUM_ONNXRUNTIME),
            masked_tokens=reader.integer(Key.MASKED_TOKENS),
            files={
                name: FileEntry(size=entry.integer(Key.SIZE), sha256=entry.sha256(Key.SHA256))
                for name, entry in reader.named_readers(Key.FILES)
            },
            verification=tuple(_read_check(item) for item in reader.readers(Key.VERIFICATION, least=0)),
            evidence=_read_evidence(reader),
        )
        if not re.fullmatch(r"\d{1,6}(\.\d{1,6})*", manifest.minimum_onnxruntime):
            reader.fault(Key.MINIMUM_ONNXRUNTIME, manifest.minimum_onnxruntime, "a version like 1.23.0")
        if reader.faults:
            raise BundleError(f"the manifest has faults: {listed(reader.faults)}")
        if reader.sha256(Key.SHA256) != own_sha256(values):
            raise BundleError("the manifest does not have the sha256 that it states: it was changed or damaged")
        return manifest


def sealed_text(values: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
    """Return the text of ortgpt.json for `values`, whatever keys they have, with these files and its own sha256."""
    listed = {name: {Key.SIZE: entry.size, Key.SHA256: entry.sha256} for name, entry in sorted(files.items())}
    sealed = {**values, Key.FILES: listed}
    return json.dumps({**sealed, Key.SHA256: own_sha256(sealed)}, indent=2, ensure_ascii=False) + "\n"


def own_sha256(values: Mapping[str, Any]) -> str:
    """Return the sha256 of the manifest's canonical JSON without its own sha256."""
    rest = {key: value for key, value in values.items() if key != Key.SHA256}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _graph_values(graph: GraphSpec) -> dict[str, Any]:
    return {
        Key.ROLE: graph.role,
        Key.FILE: graph.file,
        Key.FLAVOUR: graph.flavour,
        Key.TARGET: graph.target,
        Key.CACHE: None if graph.cache is None else _cache_values(graph.cache),
        Key.INPUTS: list(graph.inputs),
        Key.OUTPUTS: list(graph.outputs),
    }


_PROMISED = {
    Key.LOGIT_BOUND, Key.RELATIVE_LOGIT_BOUND, Key.BATCH_FLIPS, Key.OUTLIER_FLIPS, Key.PIECE_FLIPS, Key.STEP_FLIPS,
}  # fmt: skip
_MAY_BE_ZERO = ("kl", "top1", "top5", "bits_per_byte", "baseline_bits_per_byte")  # a text may be certain


def _read_evidence(reader: JsonReader) -> Evidence | None:
    """Read the evidence, whose keys are the fields of its dataclass; a manifest of minor format 0 has none."""
    stated = reader.values.get(Key.EVIDENCE)
    if stated is None:
        return None
    if not isinstance(stated, Mapping):
        reader.fault(Key.EVIDENCE, stated, "an object or null")
        return None
    readers = {"int": reader.integer, "float": reader.number, "str": reader.text, "tuple[str, ...]": reader.texts}
    values = {
        item.name: readers.get(str(item.type), reader.mapping)(Key.EVIDENCE, item.name) for item in fields(Evidence)
    }
    for name, value in values.items():
        if isinstance(value, float) and value <= 0 and name not in _MAY_BE_ZERO:
            reader.fault(f"{Key.EVIDENCE}.{name}", value, "a number above 0")
    for name in ("matrices", "left_out"):
        kind = int if name == "matrices" else str
        found = values[name]
        if isinstance(found, Mapping) and not all(isinstance(value, kind) for value in found.values()):
            reader.fault(f"{Key.EVIDENCE}.{name}", values[name], f"an object of {kind.__name__} values")
    return Evidence(**values)  # type: ignore[arg-type]  # each reader returns what its field's type says


def _read_promise(reader: JsonReader) -> Mapping[str, Any]:
    """Read a promise; of what it says beside its kind, this version knows some numbers."""
    promise = reader.mapping(Key.PRECISION, Key.PROMISE)
    for key in _PROMISED & promise.keys():
        reader.number(Key.PRECISION, Key.PROMISE, key)
    return promise


def describe_graph(graph: GraphSpec) -> str:
    """Return what a graph is in a few words."""
    cache = "no cache" if graph.cache is None else f"{graph.cache.kind} {graph.cache.dtype} cache"
    return f"{graph.role}, {graph.flavour}, {graph.target}, {cache}"


def _cache_values(cache: CacheSpec) -> dict[str, Any]:
    return {Key.KIND: cache.kind, Key.DTYPE: cache.dtype, Key.HEAD_DIM: cache.head_dim}


def _read_cache(reader: JsonReader) -> CacheSpec | None:
    if isinstance(reader.values, Mapping) and Key.CACHE in reader.values and reader.values[Key.CACHE] is None:
        return None
    return CacheSpec(
        kind=reader.text(Key.CACHE, Key.KIND),
        dtype=reader.text(Key.CACHE, Key.DTYPE),
        head_dim=reader.integer(Key.CACHE, Key.HEAD_DIM),
    )


def _read_graph(reader: JsonReader) -> GraphSpec:
    # Any words are taken here: a bundle may hold a graph for another runtime. `session` chooses among those it knows.
    return GraphSpec(
        role=reader.text(Key.ROLE),
        file=reader.text(Key.FILE),
        flavour=reader.text(Key.FLAVOUR),
        target=reader.text(Key.TARGET),
        cache=_read_cache(reader),
        inputs=reader.texts(Key.INPUTS),
        outputs=reader.texts(Key.OUTPUTS),
    )


def _check_values(check: Check) -> dict[str, Any]:
    return {
        Key.NAME: check.name,
        Key.POSITIONS: check.positions,
        Key.MAX_ABS_DIFF: check.max_abs_diff,
        Key.MAX_ABS_LOGIT: check.max_abs_logit,
        Key.TOLERANCE: check.tolerance,
        Key.ARGMAX_COMPARED: check.argmax_compared,
        Key.ARGMAX_DIFFERING: check.argmax_differing,
    }


def _read_check(reader: JsonReader) -> Check:
    return Check(
        name=reader.text(Key.NAME),
        positions=reader.integer(Key.POSITIONS),
        max_abs_diff=reader.number(Key.MAX_ABS_DIFF),
        max_abs_logit=reader.number(Key.MAX_ABS_LOGIT),
        tolerance=reader.number(Key.TOLERANCE),
        argmax_compared=reader.integer(Key.ARGMAX_COMPARED),
        argmax_differing=reader.integer(Key.ARGMAX_DIFFERING),
    )
