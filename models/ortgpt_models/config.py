"""The shape of a network, GPT-2 or GPT-1, by the keys of a Hugging Face config.json. Knows no weights and no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ortgpt_models.errors import ModelError

# Names of `transformers` for the same function, up to rounding: GELU by a tanh, and by the error function.
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast")
ERF_GELUS = ("gelu", "gelu_python")
# All that `transformers` knows, except prelu and xielu, whose parameters no checkpoint holds.
ACTIVATIONS = (
    *TANH_GELUS, *ERF_GELUS, "gelu_10", "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "silu", "swish",
    "hardswish", "mish", "tanh", "sigmoid", "laplace", "sqrtsoftplus", "linear",
)  # fmt: skip

# Places of the LayerNorm: before attention and MLP, and once more before the head (GPT-2); or only after each residual
# addition (GPT-1).
PRE, POST = "pre", "post"
_GPT2, _GPT1 = "gpt2", "openai-gpt"  # values of model_type
# The activations of GPT-1, which config.json calls `afn`; "gelu" is the tanh form there.
_AFNS = {"gelu": "gelu_new", "silu": "silu", "swish": "swish", "relu": "relu"}
# What the config.json of a GPT-1 means by keys that it leaves out, where GPT-2's means something else.
_GPT1_DEFAULTS = {"vocab_size": 40478, "n_positions": 512, "bos_token_id": None, "eos_token_id": None}
# Fields that the config.json of a GPT-1 has no key for.
_NOT_OF_GPT1 = ("activation_function", "n_inner", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")

# Keys of a Hugging Face config that change the computed function, with the values that `GPT` implements.
FIXED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "model_type": (_GPT2, _GPT1),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}

# More than any network has: a larger size is a mistake, and would take for ever to build.
_MAX_SIZES = {
    "vocab_size": 2**24,
    "n_positions": 2**24,
    "n_embd": 2**20,
    "n_layer": 2**10,
    "n_head": 2**20,
    "n_inner": 2**22,
}
# Other names that `transformers` accepts for these sizes.
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Describe a network; the fields but `norm` are the keys of a Hugging Face GPT-2 config.json.

    Raises ModelError naming every field out of range, and, with post-norm, every field that GPT-1 does not have.
    """

    vocab_size: int = 50257
    """Rows of the token embedding, and of the head."""
    n_positions: int = 1024
    """Longest context, in tokens."""
    n_embd: int = 768
    """Width of the residual stream, a multiple of `n_head`."""
    n_layer: int = 12
    """Layers."""
    n_head: int = 12
    """Attention heads in each layer."""
    norm: str = PRE
    """Where the LayerNorm is: "pre" (GPT-2) or "post" (GPT-1)."""
    n_inner: int | None = None
    """Hidden width of the MLP (default: 4 n_embd)."""
    activation_function: str = "gelu_new"
    """Activation of the MLP, one of ACTIVATIONS; "gelu_new" is the tanh approximation of "gelu"."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in each LayerNorm."""
    scale_attn_weights: bool = True
    """Divide the query-key products by the square root of the head dimension."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide them by the number of the layer, too, counted from 1."""
    tie_word_embeddings: bool = True
    """Whether the token embedding is the head, or the head is a matrix of its own."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    resid_pdrop: float = 0.1
    """Dropout on the residual branches, in training."""
    embd_pdrop: float = 0.1
    """Dropout on the embeddings, in training."""
    attn_pdrop: float = 0.1
    """Dropout on the attention weights, in training."""
    bos_token_id: int | None = 50256
    """Token that begins a text, if there is one."""
    eos_token_id: int | None = 50256
    """Token that ends a text, if there is one."""

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ModelError("unsupported configuration: " + "; ".join(faults))

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        """Hidden width of the MLP."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    def attention_scale(self, layer_index: int) -> float:
        """Return the factor on the query-key products of layer `layer_index` (counted from 0)."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer_index + 1) if self.scale_attn_by_inverse_layer_idx else scale

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPTConfig:
        """Read a parsed config.json of model_type "gpt2" (the default) or "openai-gpt", which is GPT-1.

        Keys that do not change the network are ignored. Of several ids that end a text the first is taken; a negative
        id, which some use for none, becomes None. Raises ModelError naming every key whose value `GPT` does not
        implement.
        """
        faults = [
            f"{key} = {values[key]!r} (accepted: {' or '.join(map(repr, allowed))})"
            for key, allowed in FIXED_KEYS.items()
            if key in values and values[key] not in allowed
        ]
        if faults:
            raise ModelError("unsupported configuration: " + "; ".join(faults))
        known = {field.name for field in fields(cls)} - {"norm"}
        aliased = {_ALIASES[key]: value for key, value in values.items() if key in _ALIASES}
        plain = {key: value for key, value in values.items() if key in known}
        twice = [key for key in aliased if key in plain and plain[key] != aliased[key]]
        if twice:
            pairs = "; ".join(f"{key} = {plain[key]!r} and {aliased[key]!r}" for key in twice)
            raise ModelError(f"a configuration with two values for one size: {pairs}")
        special = {key: _token_id(plain[key]) for key in ("bos_token_id", "eos_token_id") if key in plain}
        if values.get("model_type") != _GPT1:
            return cls(**(aliased | plain | special))
        afn = values.get("afn", "gelu")
        if not isinstance(afn, str) or afn not in _AFNS:
            raise ModelError(f"unsupported configuration: afn = {afn!r} (accepted: {', '.join(_AFNS)})")
        of_gpt1 = {"norm": POST, "activation_function": _AFNS[afn]}
        return cls(**(_GPT1_DEFAULTS | aliased | plain | special | of_gpt1))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the config.json from which `transformers` builds this network."""
        values = asdict(self)
        del values["norm"]
        if self.norm == PRE:
            return {"architectures": ["GPT2LMHeadModel"], "model_type": _GPT2, **values}
        values = {key: value for key, value in values.items() if key not in _NOT_OF_GPT1}
        afn = next(name for name, activation in _AFNS.items() if activation == self.activation_function)
        return {"architectures": ["OpenAIGPTLMHeadModel"], "model_type": _GPT1, "afn": afn, **values}

    def _faults(self) -> list[str]:
        faults = []

        def check(name: str, good: bool, accepted: str) -> None:
            if not good:
                faults.append(f"{name} = {getattr(self, name)!r} (accepted: {accepted})")

        for name, most in _MAX_SIZES.items():
            value = getattr(self, name)
            fits = (value is None and name == "n_inner") or (_is_int(value, 1) and value <= most)
            check(name, fits, f"an integer from 1 to {most}")
        check("norm", self.norm in (PRE, POST), f"{PRE}, {POST}")
        check("activation_function", self.activation_function in ACTIVATIONS, ", ".join(ACTIVATIONS))
        for name in ("layer_norm_epsilon", "initializer_range"):
            check(name, _is_number(getattr(self, name)) and 0 < getattr(self, name) < 1, "a number between 0 and 1")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            check(name, _is_number(getattr(self, name)) and 0 <= getattr(self, name) < 1, "a number from 0 to below 1")
        for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
            check(name, isinstance(getattr(self, name), bool), "true or false")
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            check(name, value is None or _is_int(value, 0), "null or an integer of 0 or more")
        if not faults and self.n_embd % self.n_head:
            faults.append(f"n_embd = {self.n_embd} with n_head = {self.n_head} (accepted: n_embd a multiple of n_head)")
        if not faults and self.norm == POST:
            here = f" with norm {POST!r}, as in GPT-1"
            check("n_inner", self.inner_dim == 4 * self.n_embd, f"{4 * self.n_embd}, which is 4 n_embd,{here}")
            check("activation_function", self.activation_function in _AFNS.values(), ", ".join(_AFNS.values()) + here)
            check("scale_attn_weights", self.scale_attn_weights, f"true{here}")
            check("scale_attn_by_inverse_layer_idx", not self.scale_attn_by_inverse_layer_idx, f"false{here}")
        return faults


def _token_id(value: Any) -> Any:
    """Return the first id of a list; None for a negative id, and for a list without any other."""
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        return value
    return next((each for each in ids if each >= 0), None)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
