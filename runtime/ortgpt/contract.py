"""The contract between exporter and runtime: names of tensors and of a bundle's files, and the manifest's known values.

The only module that contains these strings. It composes names and does nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT_MAJOR = 1
# 1: evidence, graphs without a cache; 2: a graph for prompts; 3: the names of promises; 4: hidden states, post-norm
# networks, classifiers, other tokenizers; 5: what surrounds the texts of a classifier; 6: weights made when opened
FORMAT_MINOR = 6
MINIMUM_ONNXRUNTIME = "1.23.2"


class File:
    """Names of the files in a bundle."""

    MANIFEST = "ortgpt.json"
    MODEL = "model.onnx"
    PREFILL = "prefill.onnx"  # for many tokens at once; reads what it can of the decoder's weights
    MADE = "made-when-opened"  # what a graph names as the file of weights that no file holds
    SELECT = "select.onnx"  # picks the best logits on the device that computed them
    MODEL_DATA = "model.onnx.data"  # the weights, where they are too large for the graph's own file
    CONFIG = "config.json"
    GENERATION_CONFIG = "generation_config.json"
    VOCAB = "vocab.json"
    MERGES = "merges.txt"
    TOKENIZER = "tokenizer.json"
    TOKENIZER_CONFIG = "tokenizer_config.json"
    GENAI_CONFIG = "genai_config.json"


class Tensor:
    """Names of graph inputs and outputs. Layers count from 0."""

    INPUT_IDS = "input_ids"
    POSITION_IDS = "position_ids"
    ATTENTION_MASK = "attention_mask"  # 1 where a position of the cache or of the new tokens counts, else 0
    SEQLENS_K = "seqlens_k"  # valid positions of each row after the call, less 1
    TOTAL_SEQUENCE_LENGTH = "total_sequence_length"  # the longest row's valid positions after the call
    LOGIT_POSITIONS = "logit_positions"  # the places within the sequence whose hidden states are computed
    LOGIT_ROWS = "logit_rows"  # which of those the head turns into logits, counted from 0; may be none
    LOGITS = "logits"
    HIDDEN_STATES = "hidden_states"  # what the head turns into logits, at all of `logit_positions`
    PENALIZED_IDS = "penalized_ids"  # the ids whose logits a repetition penalty lowers; one may be there twice
    PENALTIES = "penalties"  # the repetition penalty of each row
    TOP_LOGITS = "top_logits"
    TOP_IDS = "top_ids"
    NON_FINITE = "non_finite"  # 0, or NaN where a row has logits that are no number or infinite

    @staticmethod
    def past(layer: int | str, kind: str) -> str:
        """Return the name of a layer's cache as it goes in; `kind` is "key" or "value"."""
        return f"past_key_values.{layer}.{kind}"

    @staticmethod
    def present(layer: int | str, kind: str) -> str:
        """Return the name of a layer's cache as it comes out."""
        return f"present.{layer}.{kind}"


KEY_VALUE = ("key", "value")


def past_names(n_layer: int) -> list[str]:
    """Return the names of all caches as they go in, layer by layer, keys before values."""
    return [Tensor.past(layer, kind) for layer in range(n_layer) for kind in KEY_VALUE]


def present_names(n_layer: int) -> list[str]:
    """Return the names of all caches as they come out, in the order of past_names()."""
    return [Tensor.present(layer, kind) for layer in range(n_layer) for kind in KEY_VALUE]


class Axis:
    """Names of the dynamic axes."""

    BATCH = "batch_size"
    SEQUENCE = "sequence_length"
    CACHE = "cache_length"
    HIDDEN = "hidden_count"
    LOGIT = "logit_count"
    PENALIZED = "penalized_count"
    PAST = "past_sequence_length"
    TOTAL = "total_sequence_length"  # past and new together


class DType:
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"  # of weights
    INT4 = "int4"  # of weights
    INT32 = "int32"
    INT64 = "int64"


Axes = tuple[str | int, ...]
Spec = tuple[str, Axes]  # element type and axes


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """The sizes of a key-value cache that do not change from call to call."""

    n_layer: int
    n_head: int
    head_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values."""
        return (
            len(KEY_VALUE)
            * self.n_layer
            * self.n_head
            * self.head_dim
            * {DType.FLOAT32: 4, DType.FLOAT16: 2}[self.dtype]
        )


def graph_tensors(
    flavour: str, kv_shape: KVShape, vocab_size: int, n_embd: int | None
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return the inputs and the outputs of a graph, in order; a dynamic axis is a name.

    Logits and hidden states are always float32. Without `n_embd`, a native graph has no hidden states, as in bundles of
    format 1.3 and older.
    """
    if flavour == Flavour.NATIVE:
        return _native_tensors(kv_shape, vocab_size, n_embd)
    return _portable_tensors(kv_shape, vocab_size)


def _native_tensors(kv: KVShape, vocab_size: int, n_embd: int | None) -> tuple[dict[str, Spec], dict[str, Spec]]:
    cache: Spec = (kv.dtype, (Axis.BATCH, kv.n_head, Axis.CACHE, kv.head_dim))
    inputs: dict[str, Spec] = {
        Tensor.INPUT_IDS: (DType.INT64, (Axis.BATCH, Axis.SEQUENCE)),
        Tensor.POSITION_IDS: (DType.INT64, (Axis.BATCH, Axis.SEQUENCE)),
        Tensor.SEQLENS_K: (DType.INT32, (Axis.BATCH,)),
        Tensor.TOTAL_SEQUENCE_LENGTH: (DType.INT32, ()),
        Tensor.LOGIT_POSITIONS: (DType.INT64, (Axis.BATCH, Axis.LOGIT)),
    }
    outputs: dict[str, Spec] = {Tensor.LOGITS: (DType.FLOAT32, (Axis.BATCH, Axis.LOGIT, vocab_size))}
    if n_embd is not None:
        inputs[Tensor.LOGIT_POSITIONS] = (DType.INT64, (Axis.BATCH, Axis.HIDDEN))
        inputs[Tensor.LOGIT_ROWS] = (DType.INT64, (Axis.LOGIT,))
        outputs[Tensor.HIDDEN_STATES] = (DType.FLOAT32, (Axis.BATCH, Axis.HIDDEN, n_embd))
    inputs |= dict.fromkeys(past_names(kv.n_layer), cache)
    outputs |= dict.fromkeys(present_names(kv.n_layer), cache)
    return inputs, outputs


def _portable_tensors(kv: KVShape, vocab_size: int) -> tuple[dict[str, Spec], dict[str, Spec]]:
    inputs: dict[str, Spec] = {
        Tensor.INPUT_IDS: (DType.INT64, (Axis.BATCH, Axis.SEQUENCE)),
        Tensor.ATTENTION_MASK: (DType.INT64, (Axis.BATCH, Axis.TOTAL)),
        Tensor.POSITION_IDS: (DType.INT64, (Axis.BATCH, Axis.SEQUENCE)),
    }
    outputs: dict[str, Spec] = {Tensor.LOGITS: (DType.FLOAT32, (Axis.BATCH, Axis.SEQUENCE, vocab_size))}
    past, present = ((kv.dtype, (Axis.BATCH, kv.n_head, axis, kv.head_dim)) for axis in (Axis.PAST, Axis.TOTAL))
    inputs |= dict.fromkeys(past_names(kv.n_layer), past)
    outputs |= dict.fromkeys(present_names(kv.n_layer), present)
    return inputs, outputs


DEVICE_TOP_K = 64  # logits a row that a device top-k graph returns; more than the 50 that are drawn from by default


def topk_tensors(vocab_size: int, allowed_vocab_size: int) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return inputs and outputs of a device top-k graph, which looks at the first `allowed_vocab_size` logits."""
    top = (Axis.BATCH, min(DEVICE_TOP_K, allowed_vocab_size))
    inputs: dict[str, Spec] = {
        Tensor.LOGITS: (DType.FLOAT32, (Axis.BATCH, 1, vocab_size)),
        Tensor.PENALIZED_IDS: (DType.INT64, (Axis.BATCH, Axis.PENALIZED)),
        Tensor.PENALTIES: (DType.FLOAT32, (Axis.BATCH, 1)),
    }
    outputs: dict[str, Spec] = {
        Tensor.TOP_LOGITS: (DType.FLOAT32, top),
        Tensor.TOP_IDS: (DType.INT64, top),
        Tensor.NON_FINITE: (DType.FLOAT32, (Axis.BATCH,)),
    }
    return inputs, outputs


def classifier_tensors(task: str, num_labels: int) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return inputs and outputs of a classifier's graph, the same for both flavours; they are those of Optimum."""
    each = (Axis.SEQUENCE,) if task == Task.TOKEN_CLASSIFICATION else ()
    tokens: Spec = (DType.INT64, (Axis.BATCH, Axis.SEQUENCE))
    outputs: dict[str, Spec] = {Tensor.LOGITS: (DType.FLOAT32, (Axis.BATCH, *each, num_labels))}
    return {Tensor.INPUT_IDS: tokens, Tensor.ATTENTION_MASK: tokens}, outputs


class Task:
    TEXT_GENERATION = "text-generation"
    TEXT_CLASSIFICATION = "text-classification"  # a label for a text
    TOKEN_CLASSIFICATION = "token-classification"  # a label for each token


class ProblemType:
    """What the logits of a text's labels mean, in config.json."""

    REGRESSION = "regression"  # numbers as they are
    SINGLE_LABEL = "single_label_classification"  # one of the labels holds
    MULTI_LABEL = "multi_label_classification"  # each label holds or does not


class FineTuning:
    """What a classifier of texts was fine-tuned for, in config.json (Radford et al. 2018, section 3.3)."""

    CLASSIFICATION = "classification"  # a text has a label
    ENTAILMENT = "entailment"  # a pair of texts in this order has a label
    SIMILARITY = "similarity"  # a pair has a label; its logits are the sum of those of both orders
    MULTIPLE_CHOICE = "multiple-choice"  # each choice has a score, from the pair of context and choice


FINE_TUNINGS = (
    FineTuning.CLASSIFICATION, FineTuning.ENTAILMENT, FineTuning.SIMILARITY, FineTuning.MULTIPLE_CHOICE,
)  # fmt: skip


class Norm:
    PRE = "pre"  # before attention and MLP, and once more before the head: GPT-2
    POST = "post"  # after each residual addition: GPT-1


class TokenizerKind:
    BYTE_LEVEL_BPE = "byte-level-bpe"  # vocab.json and merges.txt, as GPT-2 has them
    TOKENIZER_JSON = "tokenizer-json"  # tokenizer.json of any kind, which the package tokenizers runs
    NONE = "none"  # calls take and give token ids


# The files that a tokenizer of each kind is read from.
TOKENIZER_FILES = {
    TokenizerKind.BYTE_LEVEL_BPE: (File.VOCAB, File.MERGES),
    TokenizerKind.TOKENIZER_JSON: (File.TOKENIZER,),
    TokenizerKind.NONE: (),
}


class Role:
    """What a graph computes. A bundle may later hold graphs of further roles; the runtime passes over unknown ones."""

    DECODER = "decoder"  # serves prefill and decode alike
    PROMPT = "prompt"  # the decoder's function, tensors and cache; faster for many tokens at once
    PREFILL = "prefill"  # the same in formats 1.2 to 1.5, whose files hold all weights
    CLASSIFIER = "classifier"  # the logits of labels, of whole texts, without a cache
    SELECTOR = "selector"  # the largest logits of each row, after the repetition penalty


class Flavour:
    NATIVE = "native"  # fused attention on a fixed cache
    PORTABLE = "portable"  # standard operators and a growing cache, as Hugging Face Optimum has them


class Target:
    CPU = "cpu"
    CUDA = "cuda"


class CacheKind:
    FIXED = "fixed"  # buffers that the graph updates in place
    GROWING = "growing"  # each call returns the past with the new tokens appended


CACHE_KINDS = {Flavour.NATIVE: CacheKind.FIXED, Flavour.PORTABLE: CacheKind.GROWING}


class RecipeName:
    """How weights were turned into what the graph holds."""

    NONE = "none"
    WEIGHT_BLOCKS = "weight-blocks"  # integers in blocks that share a scale
    W8A8_ROWS = "w8a8-rows"  # 8-bit weights and activations, one scale for each row of activations
    DYNAMIC_TENSOR = "dynamic-tensor"  # the same, one scale for a whole tensor of activations


class PromiseKind:
    """What a precision promises of batched, pieced and cached decoding against plain decoding."""

    EXACT = "exact"  # the same tokens
    BOUNDED = "bounded"  # the same, except where the two best logits lie closer than a bound
    BATCH_DEPENDENT = "batch_dependent"  # none: the other rows of a batch decide how a row is rounded
