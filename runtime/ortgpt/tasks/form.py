"""The form of a task: its prompt with named fields, examples before it, options, and how the answer is taken.

A form is a TOML file. Those that come with the package are in the folder `forms`; a user's own is read the same way.
Runs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortgpt.bundle.files import read_text
from ortgpt.errors import BundleError, FormError, FormNotFoundError, OptionError, listed, shown
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.tasks.form_reader import Table, read_options
from ortgpt.tasks.options import FORM_OPTIONS, RANKING_OPTIONS, SEARCH_OPTIONS, check_options
from ortgpt.tasks.template import ACCEPTED, Template

FORMS = Path(__file__).parent / "forms"
RESERVED = frozenset({"line", "error", "prompt", "answer", "logprob", "is_likeliest", "probabilities", "choices",
                      "completion"})  # fmt: skip
"""The names in the record of an answer, which no field can have."""

# What each kind of answer has beside its kind, and which options its form can set.
_KEYS = {
    "text": (),
    "line": (),
    "sentences": ("count",),
    "words": ("count",),
    "last_word": ("stop_words", "ends"),
    "label": ("labels", "normalize"),
}
KINDS = tuple(_KEYS)
_OPTIONS = {"last_word": SEARCH_OPTIONS, "label": RANKING_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class AnswerRule:
    """How the answer is taken from what the model says after a prompt."""

    kind: str
    """ "text" (all of the continuation), "line" (the first that is not blank), "sentences" or "words" (the first
    `count`), "last_word" (the likeliest), "label" (the likeliest)."""
    count: int = 1
    """How many sentences or words."""
    stop_words: frozenset[str] = frozenset()
    """Words in lower case that cannot be a last word."""
    ends: tuple[str, ...] = ()
    """What a token begins with that may follow a last word; empty for all that does not continue the word."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The continuation that stands for each label."""
    normalize: str = "tokens"
    """What a label's log-likelihood is divided by, as in Generator.choose."""


@dataclass(frozen=True, kw_only=True)
class TaskForm:
    """A task as a text to continue. `read_form` reads one from a file, `from_dict` from what such a file holds."""

    name: str
    """The name of a form of the package, or the path of the file."""
    description: str
    """What the task is, in one line."""
    prompt: Template
    """The text to continue; its fields are what a call has to give."""
    examples: str = ""
    """The examples, written out one after another; they precede the prompt."""
    options: GenerationOptions = field(default_factory=GenerationOptions)
    """Options of the generation, where the call sets none."""
    answer: AnswerRule
    """How the answer is taken."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that a call has to give."""
        return self.prompt.fields

    def render(self, values: Mapping[str, str]) -> str:
        """Return the text to continue: the examples, and the prompt with these values, one for each field."""
        return self.examples + self.prompt.render(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, name: str = "form") -> TaskForm:
        """Make a form from the parsed TOML of a file. Raises FormError that names every fault."""
        if not isinstance(values, Mapping):
            raise FormError(f"{name} = {shown(values)} (accepted: a mapping of the keys of a form)")
        faults: list[str] = []
        top = Table(values, faults)
        description = top.text("description", "a text of one line")
        if "\n" in description:
            faults.append("description has several lines (accepted: a text of one line)")
        prompt = _read_template(top, "prompt")
        if prompt is not None:
            if not prompt.fields:
                faults.append(f"prompt names no field (accepted: {ACCEPTED})")
            for taken in [each for each in prompt.fields if each in RESERVED]:
                faults.append(f"prompt has the field {{{taken}}}, a name that an answer has itself; rename it")
        examples = _read_examples(top)
        answer = _read_answer(top)
        accepted = _OPTIONS.get(answer.kind, FORM_OPTIONS)
        options = read_options(top.table("options", required=False), accepted, faults)
        top.refuse_others()
        try:
            check_options(options, accepted, "")
        except OptionError as error:
            faults.append(f"options.{error}")
        if faults or prompt is None:
            raise FormError(f"{name} has faults: {listed(faults)}")
        return cls(
            name=name, description=description, prompt=prompt, examples=examples, options=options, answer=answer
        )  # fmt: skip


def _read_template(table: Table, key: str) -> Template | None:
    """Return the template under a key; None for one with faults, which are noted."""
    text = table.text(key, ACCEPTED)
    try:
        return Template.parse(text) if text else None
    except ValueError as error:
        table.fault(key, f"{error} (accepted: {ACCEPTED})")
        return None


def _read_examples(top: Table) -> str:
    """Return the examples, written out. Each gives the fields of `example`, and no others."""
    if not top.has("example") and not top.has("examples"):
        return ""
    template, found = _read_template(top, "example"), []
    for item in top.tables("examples", 'tables with the fields of "example"'):
        values = {name: item.text(name, "a text", may_be_empty=True) for name in template.fields} if template else {}
        if template is not None:
            item.refuse_others()
            found.append(template.render(values))
    return "".join(found)


def _read_answer(top: Table) -> AnswerRule:
    table = top.table("answer", required=True)
    kind = table.choice("kind", KINDS)
    values: dict[str, Any] = {}
    keys = _KEYS.get(kind, ())
    if "count" in keys:
        values["count"] = table.count("count", default=1)
    if "labels" in keys:
        labels = table.table("labels", required=True)
        values["labels"] = {name: labels.text(name, "a text, as the prompt goes on for it") for name in labels.values}
        texts = [each for each in values["labels"].values() if each]
        if table.has("labels") and (len(labels.values) < 2 or len({*texts}) < len(texts) or "" in labels.values):
            accepted = "a table with two labels or more, none without a name, whose texts differ"
            labels.fault("", f"= {shown(labels.values)} (accepted: {accepted})")
    if "normalize" in keys and table.has("normalize"):
        values["normalize"] = table.choice("normalize", ("tokens", "bytes", "none"))
    if "stop_words" in keys:
        values["stop_words"] = frozenset(word.lower() for word in table.texts("stop_words"))
        values["ends"] = table.texts("ends")
    if kind:
        table.refuse_others()
    return AnswerRule(kind=kind, **values)


def form_names() -> tuple[str, ...]:
    """Return the names of the forms that come with the package."""
    return tuple(path.stem for path in sorted(FORMS.glob("*.toml")))


def form_text(name: str) -> str:
    """Return the text of a form of the package, for a form of one's own. Raises FormNotFoundError."""
    if name not in form_names():
        raise FormNotFoundError(f"there is no form {name!r} (accepted: {', '.join(form_names())})")
    return (FORMS / f"{name}.toml").read_text(encoding="utf-8")


def read_form(source: str | os.PathLike[str]) -> TaskForm:
    """Read a form: one of the package by its name, or a TOML file by a path that has a folder or ends in .toml.

    Raises FormNotFoundError, or FormError that names every fault of the file.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise FormError(f"form = {shown(source)} (accepted: the name of a form, or the path of a file)")
    import tomllib  # here, since only tasks need it

    if isinstance(source, str) and not source.endswith(".toml") and not os.path.dirname(source):
        if source not in form_names():
            raise FormNotFoundError(
                f"there is no form {source!r} (accepted: {', '.join(form_names())}, or the path of a file: "
                f"{os.path.join(os.curdir, source or 'mine')}.toml)"
            )
        text, name = form_text(source), source
    else:
        path = Path(source)
        if not path.exists():
            raise FormNotFoundError(f"{path} does not exist; expected a TOML file with the form of a task")
        try:
            text, name = read_text(path), str(path)
        except BundleError as error:
            raise FormError(str(error)) from None
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormError(f"{name} is not readable TOML: {error}") from None
    return TaskForm.from_dict(values, name=name)
