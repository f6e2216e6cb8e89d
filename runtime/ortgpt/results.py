"""Every type that a public call returns. Computes nothing but what follows from the fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


def exp(value: float) -> float:
    """Return e to the power of a value; infinity where no float holds it."""
    return math.exp(value) if value < 709 else math.inf


@dataclass
class Timings:
    """Wall time of one call, in seconds."""

    tokenize_s: float = 0.0
    """Checking the options and encoding the prompt."""
    prefill_s: float = 0.0
    """Computing the prompt."""
    decode_s: float = 0.0
    """The steps after it."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token and the model's own log-probability of it, before any option changes the logits."""

    token_id: int
    """The token's id."""
    logprob: float | None
    """Its log-probability in nats; None for a prompt's first token, which nothing predicts."""
    top: list[tuple[int, float]]
    """The most likely tokens as (id, log-probability), most likely first; as many as `logprobs` asks for."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of a prompt."""

    text: str
    """The continuation, without prompt, stop string and end-of-text; empty if the bundle has no tokenizer."""
    token_ids: list[int]
    """All generated ids, those of a stop string and an end-of-text included."""
    finish_reason: str
    """ "stop", "length", "timeout" or "cancelled". With a grammar, "stop" says that the text is whole, unless
    `stop_reason` is a stop string."""
    stop_reason: str | int | None
    """The stop string or the end-of-text id that ended it, else None."""
    prompt_tokens: int
    """How many tokens of the prompt were used."""
    timings: Timings
    """The wall times of the rows that were computed together."""
    logprobs: list[TokenLogprob] | None = None
    """An entry for each of `token_ids`, if `logprobs` was set."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """An entry for each token of the prompt, if `echo` was set."""
    score: float | None = None
    """A beam's log-probability, divided by its length to the power of length_penalty."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a streamed continuation."""

    text: str
    """Whole characters; may be empty in the last piece."""
    token_ids: list[int]
    """The ids that came since the last piece."""
    finish_reason: str | None = None
    """As in Completion, in the last piece; None before."""
    stop_reason: str | int | None = None
    """As in Completion, in the last piece; None before."""
    logprobs: list[TokenLogprob] | None = None
    """An entry for each of `token_ids`, if `logprobs` was set."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How likely a model holds a text."""

    nll: float
    """The negative log-likelihood in nats, summed over the tokens."""
    tokens: int
    """How many tokens were predicted."""
    text_bytes: int
    """The size of the text in UTF-8 bytes, half a character counted as three; for ids, the size of their text."""
    token_ids: list[int]
    """The ids of the text."""
    token_logprobs: list[float]
    """The log-probability of each, in nats."""

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); infinite where no float holds it."""
        return exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """The nll in bits, per UTF-8 byte of the text; NaN for ids that have no text."""
        if not self.text_bytes:
            return math.nan
        return self.nll / math.log(2) / self.text_bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several continuations that choose() ranked."""

    index: int
    """Its place among the continuations of the call."""
    text: str
    """Its text."""
    score: float
    """What choices are ranked by: `logprob` divided by tokens, bytes or nothing."""
    probability: float
    """Its share of exp(score) among all choices."""
    logprob: float
    """Its log-likelihood in nats."""
    token_ids: list[int]
    """Its ids."""
    token_logprobs: list[float]
    """The log-probability of each, in nats."""


@dataclass(frozen=True, kw_only=True)
class TokenLabel:
    """What a classifier says of a token."""

    token_id: int
    """The token's id."""
    text: str
    """Its text; a part of a character is U+FFFD."""
    start: int | None
    """The place of its first character in the text; of a part of a character, that of the character. None where it is
    unknown: for a text that was given as ids, and for a tokenizer of another kind than byte-level BPE."""
    end: int | None
    """The place after its last character; None as in `start`."""
    label: str
    """The likeliest label."""
    probabilities: dict[str, float]
    """The probability of each label."""


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What a classifier says of a text or a pair, or of each token of a text; of choices, which are then the labels."""

    label: str | None
    """The likeliest label of the text, or the best choice; None for a regression, and where the tokens have the
    labels."""
    labels: list[str]
    """The labels that hold: of a multi-label classifier those with a probability of 0.5 or more; of a classifier of
    tokens one for each token; else `label`; none for a regression."""
    probabilities: dict[str, float]
    """The probability of each label. They add up to 1, except those of a multi-label classifier, whose labels are
    independent. Empty for a regression, and where the tokens have the labels."""
    logits: npt.NDArray[np.float32] = field(compare=False)
    """What the model computed, float32 (labels,), in the order of the classifier's labels or of the choices; for a
    regression, the values; of a classifier of tokens (tokens, labels)."""
    tokens: list[TokenLabel] = field(default_factory=list)
    """Of a classifier of tokens, an entry for each token, in order; else empty."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of an evaluation."""

    value: float
    """The figure."""
    stderr: float | None
    """Its standard error; None for a single row, and for figures that have none."""
    baseline: float
    """What it would be if all choices, or else all tokens, were equally likely."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well a model does on a file of rows."""

    kind: str
    """ "multiple-choice", "completion", "last-word" or "perplexity"."""
    metrics: dict[str, Metric]
    """The figures by the names of lm-evaluation-harness: of multiple choice "acc" and "acc_norm", of completions and
    last words "acc" and "perplexity", of perplexity "word_perplexity", "byte_perplexity" and "bits_per_byte"."""
    rows: int
    """How many rows were read."""
    tokens: int
    """How many tokens were predicted, those of all choices."""
    cut_rows: int
    """How many rows exceeded the context, and lost the beginning of theirs."""
    words: int | None = None
    """Of perplexity, how many words the texts have: the parts between white space, as the harness counts."""
    text_bytes: int | None = None
    """Of perplexity, the size of the texts in UTF-8 bytes."""
