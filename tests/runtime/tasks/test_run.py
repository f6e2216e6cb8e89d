"""Tasks run on small models: answers equal what generate and choose give for the prompt, written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ortgpt
from ortgpt import ContextLengthError, FormNotFoundError, OptionError, PromptError, UnknownOptionError
from ortgpt.tasks import TaskForm, read_form, run_task, run_task_batch
from ortgpt_exporter import export_bundle
from ortgpt_exporter.checkpoint.load import CheckpointSource


@pytest.fixture(scope="module")
def austen() -> Iterator[ortgpt.Generator]:
    with ortgpt.load("austen") as generator:
        yield generator


def form(**values: Any) -> TaskForm:
    given: dict[str, Any] = {"description": "d", "prompt": "{text}", "answer": {"kind": "text"}}
    return TaskForm.from_dict(given | values)


LABELS = {"kind": "label", "labels": {"good": " good girl", "bad": " vile man", "odd": " girl"}}


def test_a_summary_is_three_sentences_of_what_top_k_sampling_gives(austen: ortgpt.Generator) -> None:
    text = "Mr. Bennet was among the earliest of those who waited on Mr. Bingley."
    result = run_task(austen, "summarize", text, seed=7)
    completion = austen.generate(text + "\nTL;DR:", top_k=2, max_new_tokens=100, seed=7)
    assert result.completion is not None
    assert result.completion.token_ids == completion.token_ids
    assert result.prompt == text + "\nTL;DR:"
    assert completion.text.strip().startswith(result.answer)
    assert result.answer.count(".") + result.answer.count("!") + result.answer.count("?") >= 3
    assert len(result.answer) < len(completion.text)


def test_a_translation_is_greedy_and_ends_with_its_line(austen: ortgpt.Generator) -> None:
    result = run_task(austen, "translate", {"text": "I have a dog."})
    completion = austen.generate(result.prompt, do_sample=False, max_new_tokens=60, stop="\n")
    assert result.completion is not None
    assert result.completion.text == completion.text
    assert completion.text.strip().startswith(result.answer)


@pytest.mark.parametrize("normalize", ["tokens", "bytes", "none"])
def test_a_label_is_what_choose_ranks_first(austen: ortgpt.Generator, normalize: str) -> None:
    labels = form(prompt="{text} very", answer=LABELS | {"normalize": normalize})
    result = run_task(austen, labels, "She was a")
    choices = austen.choose("She was a very", [" good girl", " vile man", " girl"], normalize=normalize)
    names = ["good", "bad", "odd"]
    assert result.choices == choices
    assert result.answer == names[choices[0].index]
    assert result.probabilities == {names[choice.index]: choice.probability for choice in choices}
    assert next(iter(result.probabilities)) == result.answer
    assert result.completion is None


def test_each_kind_takes_its_part_of_the_continuation(austen: ortgpt.Generator) -> None:
    text = austen.generate("It is", max_new_tokens=40).text
    options = {"max_new_tokens": 40}
    whole = run_task(austen, form(options=options), "It is")
    assert whole.answer == text.strip()
    words = run_task(austen, form(options=options, answer={"kind": "words", "count": 4}), "It is")
    assert words.answer.split() == [*text.split()[:3], text.split()[3].strip(",.")]
    line = run_task(austen, form(options=options, answer={"kind": "line"}), "It is")
    assert line.answer == text.strip().split("\n")[0]


def test_a_word_that_the_limit_cuts_is_no_answer(austen: ortgpt.Generator) -> None:
    words = form(answer={"kind": "words", "count": 50}, options={"max_new_tokens": 3})
    result = run_task(austen, words, "It is")
    assert result.completion is not None
    assert result.completion.finish_reason == "length"
    assert result.answer == result.completion.text.strip().rpartition(" ")[0].strip()


def test_a_batch_gives_each_its_solo_answer_in_order(austen: ortgpt.Generator) -> None:
    texts = ["I have a dog.", "The long road to the house of my father is wet.", "Who?"]
    for name in ("translate", "classify", "cloze"):
        # In 4 bits, other rows of a batch may change a row, unless a call forbids it.
        options: dict[str, Any] = {"deterministic": True} if name == "translate" else {}
        batch = run_task_batch(austen, name, texts, **options)
        alone = [run_task(austen, name, text, **options) for text in texts]
        assert [(each.answer, each.prompt, each.logprob) for each in batch] == [
            (each.answer, each.prompt, each.logprob) for each in alone
        ]
    assert run_task_batch(austen, "qa", []) == run_task_batch(austen, "cloze", []) == []


def test_options_of_the_call_win(austen: ortgpt.Generator) -> None:
    result = run_task(austen, "summarize", "A text.", do_sample=False, max_new_tokens=5)
    assert result.completion is not None
    assert result.completion.token_ids == austen.generate("A text.\nTL;DR:", max_new_tokens=5).token_ids
    again = run_task(austen, "summarize", "A text.", ortgpt.GenerationOptions(do_sample=False, max_new_tokens=5))
    assert again.answer == result.answer


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "the field question is missing (accepted by qa: question)"),
        ({"question": "a", "text": "b"}, "there is no field text (accepted by qa: question)"),
        ({"text": "b"}, "the field question is missing; there is no field text (accepted by qa: question)"),
        ({"question": 5}, "question = 5 (accepted: a text)"),
        (5, "5 (accepted: a mapping with a text for each of question)"),
    ],
)
def test_fields_that_do_not_fit(austen: ortgpt.Generator, fields: Any, reason: str) -> None:
    with pytest.raises(PromptError) as caught:
        run_task(austen, "qa", fields)
    assert str(caught.value) == reason
    with pytest.raises(PromptError) as caught:
        run_task_batch(austen, "qa", ["a", fields])
    assert str(caught.value) == f"rows[1]: {reason}"


@pytest.mark.parametrize("rows", [None, 5, "a text", {"text": "a"}])
def test_rows_that_are_no_list(austen: ortgpt.Generator, rows: Any) -> None:
    with pytest.raises(PromptError, match=r"^rows = .* \(accepted: a list of fields"):
        run_task_batch(austen, "summarize", rows)


def test_a_text_alone_is_for_a_form_with_one_field(austen: ortgpt.Generator) -> None:
    two = form(prompt="{a} {b}")
    with pytest.raises(PromptError, match=r"^'x' \(accepted: a mapping with a text for each of a, b\)$"):
        run_task(austen, two, "x")
    with pytest.raises(PromptError, match="rows = 'x'"):
        run_task_batch(austen, two, "x")


def test_what_a_task_cannot_have(austen: ortgpt.Generator) -> None:
    with pytest.raises(OptionError, match=r"^num_return_sequences = 2 would have no effect: a task has one answer$"):
        run_task(austen, "qa", "a", num_return_sequences=2)
    with pytest.raises(OptionError, match="max_new_tokens = 2 would have no effect: the labels of a form are ranked"):
        run_task(austen, "classify", "a", max_new_tokens=2)
    with pytest.raises(OptionError, match="top_k = 2 would have no effect: a last word is searched"):
        run_task(austen, "cloze", "a", top_k=2)
    with pytest.raises(OptionError, match=r"context_overflow = 'slide' \(accepted: error, truncate, where nothing"):
        run_task(austen, "classify", "a", context_overflow="slide")
    with pytest.raises(UnknownOptionError, match="did you mean max_new_tokens"):
        run_task(austen, "qa", "a", max_tokens=2)  # type: ignore[call-arg]
    with pytest.raises(FormNotFoundError):
        run_task(austen, "nothing", "a")


@pytest.mark.parametrize("name", ["summarize", "classify", "cloze"])
def test_a_text_beyond_the_context_is_an_error_unless_it_may_be_cut(austen: ortgpt.Generator, name: str) -> None:
    text = "It is a truth universally acknowledged that " * 40
    with pytest.raises(ContextLengthError, match=r"exceed the context of 256 tokens.*\"truncate\""):
        run_task(austen, name, text)
    cut = run_task(austen, name, text, context_overflow="truncate")
    assert cut.answer
    if name == "classify":
        ids = austen.tokenizer.encode(cut.prompt)
        longest = max(len(austen.tokenizer.encode(each)) for each in (" positive", " negative"))
        assert cut.choices == austen.choose(
            ids[len(ids) - (256 - longest) :], [" positive", " negative"], normalize="none"
        )


def test_a_bundle_without_a_tokenizer_has_no_tasks(small_checkpoint: Path, tmp_path: Path) -> None:
    bundle = export_bundle(CheckpointSource(small_checkpoint, tokenizer="none"), tmp_path / "ids").path
    with (
        ortgpt.load(bundle) as generator,
        pytest.raises(PromptError, match=r"needs text, and .* has no tokenizer"),
    ):
        run_task(generator, "summarize", "a")


def test_the_users_own_form_from_a_file(austen: ortgpt.Generator, tmp_path: Path) -> None:
    (tmp_path / "reading.toml").write_text(
        'description = "Answer a question about a text."\nprompt = "{context}\\n\\nQ: {question}\\nA:"\n'
        '[options]\nmax_new_tokens = 6\n[answer]\nkind = "line"\n'
    )
    result = run_task(austen, tmp_path / "reading.toml", {"context": "Emma is rich.", "question": "Who is {rich}?"})
    assert result.prompt == "Emma is rich.\n\nQ: Who is {rich}?\nA:"
    completion = austen.generate(result.prompt, max_new_tokens=6)
    assert result.answer == completion.text.strip().split("\n")[0].strip()
    assert read_form(tmp_path / "reading.toml").fields == ("context", "question")
