"""The manifest of a bundle, ortgpt.json, as dataclasses whose field names are its keys.

Knows no files beyond their names in the manifest; `folder` compares it with a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ortgpt.bundle.checked_json import checked, read_record
from ortgpt.contract import FORMAT_MAJOR, Norm, Task, Tensor, TokenizerKind
from ortgpt.errors import BundleError, listed, shown

OWN_HASH = "sha256"
_HEXADECIMAL = "64 hexadecimal digits"


@dataclass(frozen=True, kw_only=True)
class Format:
    """The version of the manifest's format."""

    major: int
    """A reader refuses a newer one."""
    minor: int
    """A newer one may have further keys, which a reader ignores."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What of the network config.json does not say."""

    norm: str = checked(choices=(Norm.PRE, Norm.POST))
    """Where the LayerNorm is: "pre", before attention and MLP (GPT-2), or "post", after their residuals (GPT-1)."""


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """The tokens around and between the two texts of a pair."""

    before: tuple[int, ...]
    """Token ids before the first text."""
    between: tuple[int, ...]
    """Token ids between the two texts."""
    after: tuple[int, ...]
    """Token ids after the second text."""

    def join(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Return the ids of a pair as the model reads it."""
        return [*self.before, *first, *self.between, *second, *self.after]


@dataclass(frozen=True, kw_only=True)
class Template:
    """The tokens around a text, as a post-processor of the package `tokenizers` puts them."""

    before: tuple[int, ...]
    """Token ids before a text."""
    after: tuple[int, ...]
    """Token ids after it."""
    pair: PairTemplate | None = None
    """The same of a pair of texts; null if nothing stands between the two, so that pairs are refused."""

    def surround(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text as the model reads it."""
        return [*self.before, *ids, *self.after]

    @property
    def token_ids(self) -> frozenset[int]:
        """Every id of the template."""
        pair = () if self.pair is None else (*self.pair.before, *self.pair.between, *self.pair.after)
        return frozenset((*self.before, *self.after, *pair))


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer the files of the bundle describe."""

    kind: str = checked(choices=(TokenizerKind.BYTE_LEVEL_BPE, TokenizerKind.TOKENIZER_JSON, TokenizerKind.NONE))
    """ "byte-level-bpe": vocab.json and merges.txt, as GPT-2 has them; "tokenizer-json": a tokenizer.json of any kind,
    which needs the extra [tokenizers]; "none": the model works on ids alone."""
    template: Template | None = None
    """The tokens around the texts of a classifier, if there are any."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The key-value cache that a graph works on."""

    kind: str
    """ "fixed", buffers that the graph updates in place, or "growing", returned longer by each call."""
    dtype: str
    """The element type: "float32" or "float16"."""
    head_dim: int
    """The width of a head in the cache, padding included."""


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """A matrix of bytes with one scale for each row, made of integers in blocks when its graph is opened."""

    name: str
    """The initializer of the bytes, int8 (columns, rows)."""
    file: str
    """The file that holds the integers and their scales."""
    rows: int
    """How many rows the matrix has."""
    columns: int
    """How many weights a row has."""
    bits: int
    """The bits of an integer: 4 or 8."""
    block_size: int
    """How many integers share a scale; the last block of a row may go beyond it."""
    integers: int
    """Where the integers begin in the file: uint8 (rows, blocks, block_size · bits / 8), two to a byte in 4 bits."""
    scales: int
    """Where their scales begin: float32 (rows, blocks)."""

    @property
    def scales_name(self) -> str:
        """The initializer of the scales, float32 (rows,)."""
        return f"{self.name}_scales"


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """One ONNX graph of a bundle."""

    role: str
    """What it computes: "decoder", "prompt" (before 1.6 "prefill"), "selector" or "classifier". A reader ignores
    graphs of other roles."""
    file: str
    """The name of its file."""
    flavour: str
    """ "native" or "portable"."""
    target: str
    """The device it was made for: "cpu" or "cuda"."""
    cache: CacheSpec | None
    """The cache it works on; null for a graph without one."""
    inputs: tuple[str, ...]
    """The names of its inputs, in order."""
    outputs: tuple[str, ...]
    """The names of its outputs, in order."""
    made: tuple[WholeRows, ...] = ()
    """The weights that no file holds."""

    @property
    def has_hidden_states(self) -> bool:
        """Whether it returns hidden states. Portable graphs do not, and neither do those of format 1.3 and older."""
        return Tensor.HIDDEN_STATES in self.outputs

    def __str__(self) -> str:
        cache = "no cache" if self.cache is None else f"{self.cache.kind} {self.cache.dtype} cache"
        made = f", {len(self.made)} matrices made when it is opened" if self.made else ""
        return f"{self.role}, {self.flavour}, {self.target}, {cache}{made}"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What decoding in batches, pieces and steps promises, compared with each token computed alone and one a step."""

    kind: str
    """ "exact": the same tokens; "bounded": the same, except where the two best logits lie closer than a bound;
    "batch_dependent": other rows of a batch may change a row."""
    relative_logit_bound: float | None = None
    """How far a logit moves at most, in units of the largest logit (float16)."""
    logit_bound: float | None = None
    """How far a logit moved at most, as measured (int8, int4)."""
    argmax_changes_in_batch: float | None = checked(default=None, earlier="batch_flips_per_1000_tokens")
    """How many best tokens of 1,000 changed in a batch of 8, as measured."""
    argmax_changes_beside_outliers: float | None = checked(default=None, earlier="outlier_flips_per_1000_tokens")
    """The same beside a row of outliers."""
    argmax_changes_in_prefill: float | None = checked(default=None, earlier="piece_flips_per_1000_tokens")
    """The same in a whole prefill."""
    argmax_changes_in_steps_of_four: float | None = checked(default=None, earlier="step_flips_per_1000_tokens")
    """The same in steps of four tokens."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of the weights, and how they got it."""

    dtype: str
    """ "float32", "float16", "int8" or "int4"."""
    recipe: str
    """The recipe: "none", "weight-blocks", "w8a8-rows" or "dynamic-tensor"."""
    parameters: Mapping[str, Any]
    """The parameters of the recipe."""
    promise: Promise
    """What decoding in this precision promises."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the weights came from."""

    id: str
    """The name of the checkpoint."""
    sha256: str = checked(pattern="[0-9a-f]{64}", accepted=_HEXADECIMAL)
    """The sha256 of the file of weights, or, of several files, of their sha256s in order."""
    revision: str | None = None
    """The commit of the repository on the hub."""
    licence: str | None = None
    """The licence that the checkpoint states."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest says of a file."""

    size: int
    """Its size in bytes."""
    sha256: str = checked(pattern="[0-9a-f]{64}", accepted=_HEXADECIMAL)
    """Its sha256, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of a graph with the PyTorch network that it came from."""

    name: str
    """What was computed."""
    positions: int
    """How many vectors of logits, or of hidden states, were compared."""
    max_abs_diff: float
    """The largest absolute difference of two of their numbers."""
    max_abs_logit: float
    """The largest absolute number of PyTorch's."""
    tolerance: float
    """The largest difference that is accepted."""
    argmax_compared: int
    """At how many positions the best token, or the largest number, is certain: its margin exceeds twice the largest
    difference."""
    argmax_differing: int
    """At how many of these the graph has another."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance (a NaN is not), and none that is certain differs."""
        return self.max_abs_diff <= self.tolerance and self.argmax_differing == 0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How a quantised bundle compares with the float32 bundle that it was made of."""

    text: str
    """The text that both predicted."""
    tokens: int
    """How many tokens of it."""
    perplexity: float = checked(above_zero=True)
    """The perplexity of the quantised bundle."""
    baseline_perplexity: float = checked(above_zero=True)
    """The perplexity of the float32 bundle."""
    bits_per_byte: float | None
    """Bits per UTF-8 byte of the quantised bundle; null if the bundle has no tokenizer, so that ids have no bytes."""
    baseline_bits_per_byte: float | None
    """Bits per UTF-8 byte of the float32 bundle, or null."""
    kl: float
    """KL(float32 ‖ quantised) in nats, the mean over tokens."""
    top1: float
    """The fraction of tokens at which both have the same best token."""
    top5: float
    """The fraction of the five best tokens of one that are among the five best of the other."""
    bytes_per_parameter: float = checked(above_zero=True)
    """The bytes that the weights take, per parameter of the network."""
    prefill_tokens_per_s: float = checked(above_zero=True)
    """The speed of a prefill of 128 tokens."""
    baseline_prefill_tokens_per_s: float = checked(above_zero=True)
    """The same of the float32 bundle."""
    decode_tokens_per_s: float = checked(above_zero=True)
    """The speed of the steps after it."""
    baseline_decode_tokens_per_s: float = checked(above_zero=True)
    """The same of the float32 bundle."""
    threads: int
    """The threads that the speeds were measured with."""
    cpu_features: tuple[str, ...]
    """The instruction sets of the CPU that they were measured on."""
    matrices: Mapping[str, int]
    """How many matrices have each precision."""
    left_out: Mapping[str, str]
    """The matrices that were left out, each with the reason."""

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity in units of the float32 bundle's."""
        return self.perplexity / self.baseline_perplexity


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How the labels of a quantised classifier compare with those of the float32 classifier that it was made of."""

    text: str
    """The text that both labelled, or where it comes from."""
    texts: int
    """How many texts it has."""
    labelled: int
    """How many texts, or, of a classifier of tokens, how many tokens got labels."""
    kl: float | None
    """KL(float32 ‖ quantised) of the probabilities, in nats, the mean over them; null for a regression."""
    same_labels: float | None
    """The fraction of them that got the same labels; null for a regression."""
    max_abs_diff: float
    """The largest difference of two logits."""
    bytes_per_parameter: float = checked(above_zero=True)
    """The bytes that the weights take, per parameter of the network."""
    tokens_per_s: float = checked(above_zero=True)
    """The speed on a text of 128 tokens."""
    baseline_tokens_per_s: float = checked(above_zero=True)
    """The same of the float32 bundle."""
    threads: int
    """The threads that the speeds were measured with."""
    cpu_features: tuple[str, ...]
    """The instruction sets of the CPU that they were measured on."""
    matrices: Mapping[str, int]
    """How many matrices have each precision."""
    left_out: Mapping[str, str]
    """The matrices that were left out, each with the reason."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that ortgpt.json says, beside its own sha256."""

    format: Format
    """The version of the format."""
    task: str = checked(choices=(Task.TEXT_GENERATION, Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION))
    """What the model is for: "text-generation", "text-classification" or "token-classification"."""
    architecture: Architecture
    """What of the network config.json does not say."""
    tokenizer: TokenizerSpec
    """Which tokenizer the files describe."""
    graphs: tuple[GraphSpec, ...] = checked(least_items=1)
    """The graphs, the decoder or classifier first."""
    precision: Precision
    """The precision of the weights, and what it promises."""
    source: Source
    """Where the weights came from."""
    minimum_onnxruntime: str = checked(pattern=r"\d{1,6}(\.\d{1,6})*", accepted="a version like 1.23.0")
    """The oldest ONNX Runtime that runs the graphs."""
    masked_tokens: int
    """How many rows of the model lie beyond the tokenizer's vocabulary; they are never picked."""
    files: Mapping[str, FileEntry]
    """Size and sha256 of every file, by name."""
    verification: tuple[Check, ...]
    """How the graph was compared with PyTorch."""
    evidence: Evidence | None = None
    """How the quantised bundle of a language model compares with the float32 one."""
    agreement: Agreement | None = None
    """How the quantised bundle of a classifier compares with the float32 one."""

    def to_json(self) -> str:
        """Return the text of ortgpt.json, its own sha256 included."""
        return sealed_text(asdict(self), self.files)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Manifest:
        """Read the parsed JSON of ortgpt.json.

        A newer major format is refused; unknown keys, which a newer minor may add, are ignored. Raises BundleError that
        names every fault.
        """
        faults: list[str] = []
        version = read_record(Format, values.get("format"), faults, "format.")
        if version.major != FORMAT_MAJOR and not faults:
            raise BundleError(
                f"bundle format {version.major} is not supported (accepted: {FORMAT_MAJOR}); use the version of ortgpt "
                "that wrote it, or export it again"
            )
        faults.clear()
        manifest = read_record(cls, values, faults)
        own_hash = values.get(OWN_HASH)
        if not isinstance(own_hash, str):
            faults.append(f"{OWN_HASH} = {shown(own_hash)} (accepted: {_HEXADECIMAL})")
        if faults:
            raise BundleError(f"the manifest has faults: {listed(faults)}")
        if own_hash != own_sha256(values):
            raise BundleError("the manifest does not have the sha256 that it states: it was changed or damaged")
        return manifest


def sealed_text(values: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
    """Return the text of ortgpt.json for `values`, whatever keys they have, with these files and its own sha256."""
    sealed = {**values, "files": {name: asdict(entry) for name, entry in sorted(files.items())}}
    return json.dumps({**sealed, OWN_HASH: own_sha256(sealed)}, indent=2, ensure_ascii=False) + "\n"


def own_sha256(values: Mapping[str, Any]) -> str:
    """Return the sha256 of the manifest's canonical JSON without its own sha256."""
    rest = {key: value for key, value in values.items() if key != OWN_HASH}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
