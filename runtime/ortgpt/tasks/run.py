"""Run a task: write its prompt, let the model go on or rank what could follow, and take the answer from that."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, Unpack

from ortgpt.decode.context_window import fit_prompt
from ortgpt.errors import ContextLengthError, OrtGptError, PromptError, shown
from ortgpt.generator import Generator
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.options.keywords import GenerationKeywords
from ortgpt.results import Choice, Completion
from ortgpt.tasks.answer import first_line, first_sentences, first_words
from ortgpt.tasks.form import TaskForm, read_form
from ortgpt.tasks.last_word import MAX_TOKENS, LastWords
from ortgpt.tasks.options import RANKING_OPTIONS, SEARCH_OPTIONS, TASK_OPTIONS, check_options, merged

Fields = str | Mapping[str, str]
Form = TaskForm | str | os.PathLike[str]
_Item = TypeVar("_Item")
_Done = TypeVar("_Done")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a task gave for one input."""

    answer: str
    """The summary, translation, answer, word or label; empty if the model gave none."""
    prompt: str
    """The text that the model continued."""
    completion: Completion | None = None
    """The continuation that the answer was taken from; None for a last word and for labels, which are not generated."""
    logprob: float | None = None
    """Of a last word, its log-probability in nats, and that it ends there; else None."""
    is_likeliest: bool | None = None
    """Of a last word, whether no other is likelier; False if the search ended before that was certain. Else None."""
    probabilities: dict[str, float] = field(default_factory=dict)
    """The share of each label, the likeliest first; empty for other kinds of answers."""
    choices: list[Choice] = field(default_factory=list)
    """The labels' continuations as Generator.choose ranks them; empty for other kinds of answers."""


def run_task(
    generator: Generator,
    form: Form,
    fields: Fields,
    options: GenerationOptions | None = None,
    **keywords: Unpack[GenerationKeywords],
) -> TaskResult:
    """Do a task for one input.

    `form` is one that read_form() returned, or what it takes. `fields` has a text for each field of the form's prompt;
    a text alone is the value of the only one. Options win over those of the form. Raises FormError, PromptError for
    fields that do not fit or a bundle without a tokenizer, OptionError, ContextLengthError or NonFiniteLogitsError.
    """
    return run_task_batch(generator, form, [fields], options, **keywords)[0]


def run_task_batch(
    generator: Generator,
    form: Form,
    rows: Sequence[Fields],
    options: GenerationOptions | None = None,
    **keywords: Unpack[GenerationKeywords],
) -> list[TaskResult]:
    """Do a task for several inputs, and return the results in their order; each as run_task() would.

    Continuations are generated together, as by generate_batch(); words and labels are ranked one input at a time.
    """
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Sequence):
        raise PromptError(f"rows = {shown(rows)} (accepted: a list of fields; run_task takes those of one input)")
    form = form if isinstance(form, TaskForm) else read_form(form)
    if not generator.has_text:
        raise PromptError(f"a task needs text, and {generator.bundle.path} has no tokenizer; export it with one")
    prompts = _each(rows, lambda fields: form.render(_checked_fields(form, fields)))
    made = merged(form.options, GenerationOptions.make(options, keywords))
    if form.answer.kind == "label":
        check_options(made, RANKING_OPTIONS, "the labels of a form are ranked, and nothing is generated")
        return _each(prompts, lambda prompt: _ranked(generator, form, prompt, made))
    if form.answer.kind == "last_word":
        check_options(made, SEARCH_OPTIONS, "a last word is searched, and nothing is generated")
        words = LastWords(generator, form.answer.stop_words, form.answer.ends)
        return _each(prompts, lambda prompt: _last_word(generator, words, prompt, made))
    check_options(made, TASK_OPTIONS, "a task has one answer")
    found = generator.generate_batch(prompts, made) if prompts else []
    return [
        TaskResult(answer=_answer_of(form, completion), prompt=prompt, completion=completion)
        for prompt, completion in zip(prompts, found, strict=True)
    ]


def _checked_fields(form: TaskForm, fields: Fields) -> Mapping[str, str]:
    """Return a text for each field of a form. Raises PromptError that names those that do not fit."""
    names = form.fields
    if isinstance(fields, str):
        if len(names) > 1:
            raise PromptError(f"{shown(fields)} (accepted: a mapping with a text for each of {', '.join(names)})")
        fields = {names[0]: fields}
    if not isinstance(fields, Mapping):
        raise PromptError(f"{shown(fields)} (accepted: a mapping with a text for each of {', '.join(names)})")
    missing, unknown = [name for name in names if name not in fields], [name for name in fields if name not in names]
    if missing or unknown:
        what = [f"the field {', '.join(missing)} is missing"] if missing else []
        what += [f"there is no field {', '.join(map(str, unknown))}"] if unknown else []
        raise PromptError(f"{'; '.join(what)} (accepted by {form.name}: {', '.join(names)})")
    for name in names:
        if not isinstance(fields[name], str):
            raise PromptError(f"{name} = {shown(fields[name])} (accepted: a text)")
    return fields


def _answer_of(form: TaskForm, completion: Completion) -> str:
    rule, text = form.answer, completion.text
    if rule.kind == "sentences":
        return first_sentences(text, rule.count)
    if rule.kind == "words":
        return first_words(text, rule.count, is_whole=completion.finish_reason == "stop")
    return first_line(text) if rule.kind == "line" else text.strip()


def _each(items: Sequence[_Item], job: Callable[[_Item], _Done]) -> list[_Done]:
    """Do a job for each item; the error of one among several names its place."""
    done = []
    for place, item in enumerate(items):
        try:
            done.append(job(item))
        except OrtGptError as error:
            if len(items) == 1:
                raise
            raise error.at(f"rows[{place}]") from None
    return done


def _ranked(generator: Generator, form: TaskForm, prompt: str, options: GenerationOptions) -> TaskResult:
    names, continuations = [*form.answer.labels], [*form.answer.labels.values()]
    longest = max(len(generator.prompt_ids(each)) for each in continuations)
    ids = _fitted(generator, prompt, options, longest)
    choices = generator.choose(ids, continuations, normalize=form.answer.normalize)
    return TaskResult(
        answer=names[choices[0].index],
        prompt=prompt,
        probabilities={names[choice.index]: choice.probability for choice in choices},
        choices=choices,
    )


def _last_word(generator: Generator, words: LastWords, prompt: str, options: GenerationOptions) -> TaskResult:
    prompt = prompt.rstrip()  # GPT-2's tokens begin with their space
    max_tokens = options.max_new_tokens or MAX_TOKENS
    path = words.find(_fitted(generator, prompt, options, max_tokens), max_tokens)
    if path is None:
        return TaskResult(answer="", prompt=prompt, is_likeliest=False)
    word = generator.tokenizer.decode(path.token_ids).removeprefix(" ")
    return TaskResult(answer=word, prompt=prompt, logprob=path.logprob, is_likeliest=path.is_likeliest)


def _fitted(generator: Generator, prompt: str, options: GenerationOptions, new_tokens: int) -> Sequence[int]:
    """Return the ids of a prompt that leaves room for `new_tokens`, cut if the options ask for that."""
    n_positions = generator.bundle.config.n_positions
    resolved = generator.resolve(replace(options, max_new_tokens=new_tokens))
    ids, _, _ = fit_prompt(resolved, generator.prompt_ids(prompt) or [generator.start_id], n_positions)
    if len(ids) + new_tokens > n_positions:
        raise ContextLengthError(
            f"a prompt of {len(ids)} tokens and {new_tokens} more exceed the context of {n_positions} tokens; shorten "
            'the text, or give context_overflow = "truncate", which drops the beginning of the prompt'
        )
    return ids
