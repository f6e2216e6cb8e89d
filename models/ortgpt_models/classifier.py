"""A network with a classifier's head in place of the language model's: its labels, and how it is computed.

Knows no files, text or ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ortgpt_models.config import GPTConfig
from ortgpt_models.errors import ModelError
from ortgpt_models.gpt import GPT, Attend

# The classes of `transformers` by what they label.
TEXT_CLASSIFIERS = ("GPT2ForSequenceClassification", "OpenAIGPTForSequenceClassification")
TOKEN_CLASSIFIERS = ("GPT2ForTokenClassification",)
REGRESSION, SINGLE_LABEL, MULTI_LABEL = "regression", "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = (REGRESSION, SINGLE_LABEL, MULTI_LABEL)

# What a classifier of texts may have been fine-tuned for: GPT-1's tasks (Radford et al. 2018, section 3.3).
CLASSIFICATION, ENTAILMENT, SIMILARITY, MULTIPLE_CHOICE = (
    "classification", "entailment", "similarity", "multiple-choice",
)  # fmt: skip
FINE_TUNINGS = (CLASSIFICATION, ENTAILMENT, SIMILARITY, MULTIPLE_CHOICE)

_DEFAULT_LABELS = 2  # of `transformers`, for a config.json that names none
_MAX_LABELS = 2**20


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """What a classifier's config.json says of its head."""

    architecture: str
    """The class of `transformers`."""
    labels: tuple[str, ...]
    """The name of each label, in the order of the logits."""
    problem_type: str
    """One of PROBLEM_TYPES; each token of a token classifier has a single label."""
    pad_token_id: int | None = None
    """The token that filled up the rows of a batch in training, if there is one."""
    finetuning_task: str | None = None
    """One of FINE_TUNINGS, which says what a classifier of texts reads; None if config.json does not say it."""

    @property
    def labels_tokens(self) -> bool:
        """Whether each token has a label, or the text as a whole."""
        return self.architecture in TOKEN_CLASSIFIERS

    @property
    def head_name(self) -> str:
        """The name of the head's module in a checkpoint."""
        return "classifier" if self.labels_tokens else "score"

    def head_shapes(self, n_embd: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the head's tensors by their names."""
        count = len(self.labels)
        shapes: dict[str, tuple[int, ...]] = {f"{self.head_name}.weight": (count, n_embd)}
        return shapes | ({f"{self.head_name}.bias": (count,)} if self.labels_tokens else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClassifierConfig | None:
        """Read a parsed config.json; return None for one that names no classifier in `architectures`.

        A missing problem_type becomes what training in `transformers` takes for one: regression for a single label,
        else one label of several. Raises ModelError naming every value that does not fit.
        """
        architecture = next(iter(_classifiers(values.get("architectures"))), None)
        if architecture is None:
            return None
        faults: list[str] = []
        labels = _labels(values, faults)
        problem_type = values.get("problem_type")
        if problem_type is not None and problem_type not in PROBLEM_TYPES:
            faults.append(f"problem_type = {problem_type!r} (accepted: null, {', '.join(PROBLEM_TYPES)})")
        if architecture in TOKEN_CLASSIFIERS:
            problem_type = SINGLE_LABEL
        pad = values.get("pad_token_id")
        pad = pad if isinstance(pad, int) and not isinstance(pad, bool) and pad >= 0 else None
        if faults:
            raise ModelError(f"unsupported configuration of {architecture}: {'; '.join(faults)}")
        default = REGRESSION if len(labels) == 1 else SINGLE_LABEL
        named = values.get("finetuning_task")  # programs of `transformers` wrote other values, such as "mnli"
        return cls(
            architecture=architecture,
            labels=labels,
            problem_type=problem_type or default,
            pad_token_id=pad,
            finetuning_task=next((task for task in FINE_TUNINGS if task == named), None),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of config.json that `transformers` builds this head from."""
        return {
            "architectures": [self.architecture],
            "id2label": {str(index): label for index, label in enumerate(self.labels)},
            "label2id": {label: index for index, label in enumerate(self.labels)},
            "problem_type": None if self.labels_tokens else self.problem_type,
            "pad_token_id": self.pad_token_id,
            **({} if self.finetuning_task is None else {"finetuning_task": self.finetuning_task}),
        }


class GPTClassifier(nn.Module):
    """The network `gpt` with a linear head, whose tied language-model head is not used."""

    def __init__(self, gpt: GPT, config: ClassifierConfig, state: Mapping[str, Tensor]) -> None:
        """Take the body, and the head's tensors by their names in a checkpoint."""
        super().__init__()
        self.gpt = gpt
        self.config = config
        self.weight = nn.Parameter(state[f"{config.head_name}.weight"], requires_grad=False)
        bias = state.get(f"{config.head_name}.bias")
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def head(self, x: Tensor) -> Tensor:
        """Map (..., n_embd) to the logits of the labels, (..., num_labels)."""
        return F.linear(x, self.weight, self.bias)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attend: Attend | None = None,
        logit_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the labels, (batch, seq or logit_count, num_labels); arguments as in GPT.forward().

        A text's own logits are those of its last token.
        """
        return self.head(self.gpt.hidden(input_ids, position_ids, attend=attend, logit_positions=logit_positions))


def body_config(config: GPTConfig) -> GPTConfig:
    """Return the configuration of a classifier's body, which has no head of its own to store."""
    return replace(config, tie_word_embeddings=True)


def _classifiers(architectures: Any) -> list[str]:
    names = architectures if isinstance(architectures, list) else []
    return [name for name in names if name in (*TEXT_CLASSIFIERS, *TOKEN_CLASSIFIERS)]


def _labels(values: Mapping[str, Any], faults: list[str]) -> tuple[str, ...]:
    """Return the names of the labels, by default LABEL_0 and so on, and note what does not fit.

    A num_labels that is not the number of names replaces all of them, as in `transformers` 5.
    """
    names, count = values.get("id2label"), values.get("num_labels")
    if names is None:
        count = values.get("_num_labels", _DEFAULT_LABELS) if count is None else count
    elif isinstance(names, dict) and not isinstance(count, bool) and count == len(names):
        count = None  # 3.0 too: `transformers` compares the two, and does not count to it
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MAX_LABELS):
        faults.append(f"num_labels = {count!r} (accepted: an integer from 1 to {_MAX_LABELS})")
        return ()
    if names is not None and (not isinstance(names, dict) or not (names or count)):
        faults.append(f"id2label = {names!r} (accepted: an object with a name for each label)")
        return ()
    if count is not None:
        return tuple(f"LABEL_{index}" for index in range(count))
    assert isinstance(names, dict), "of labels without a count, the names are known"
    wanted = [str(index) for index in range(len(names))]
    if sorted(names) != sorted(wanted):
        faults.append(f"id2label has the keys {', '.join(map(str, names))[:80]} (accepted: 0 to {len(names) - 1})")
        return ()
    if not all(isinstance(names[key], (str, int)) for key in wanted):
        faults.append("id2label has a name that is neither a text nor a number (accepted: texts, integers)")
        return ()
    labels = tuple(str(names[key]) for key in wanted)
    halves = [label for label in labels if any(0xD800 <= ord(letter) < 0xE000 for letter in label)]
    if halves:
        faults.append(f"id2label has the name {halves[0]!r}, which has half a character (accepted: whole ones)")
    twice = sorted({label for label in labels if labels.count(label) > 1}) if len(set(labels)) < len(labels) else []
    if twice:
        faults.append(f"id2label names {', '.join(map(repr, twice))} more than once (accepted: a name for one label)")
    return labels


def label_notes(values: Mapping[str, Any], config: ClassifierConfig) -> list[str]:
    """Return a remark if the names in a config.json were not taken."""
    names, count = values.get("id2label"), len(config.labels)
    if not names or len(names) == count:
        return []
    return [
        f"num_labels = {count} with {len(names)} names in id2label; the labels are LABEL_0 to LABEL_{count - 1}, as in "
        "`transformers` 5"
    ]
