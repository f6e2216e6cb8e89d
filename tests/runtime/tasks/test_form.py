"""Forms: what the prompts of the package's own are, to the letter; a user's own; and every fault of a file at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ortgpt import FormError, FormNotFoundError
from ortgpt.tasks import TaskForm, form_names, form_text, read_form

PROMPTS: dict[str, tuple[dict[str, str], str]] = {
    "summarize": ({"text": "A long story."}, "A long story.\nTL;DR:"),
    "translate": (
        {"text": "I have a dog."},
        "The house is small. = La maison est petite.\n"
        "Where is the station? = Où est la gare ?\n"
        "My sister reads a book. = Ma sœur lit un livre.\n"
        "We will come tomorrow. = Nous viendrons demain.\n"
        "I have a dog. =",
    ),
    "qa": (
        {"question": "Who?"},
        "Q: Who wrote the play Hamlet?\nA: William Shakespeare\n"
        "Q: What is the capital of Italy?\nA: Rome\n"
        "Q: In which year did the first man walk on the moon?\nA: 1969\n"
        "Q: What is the largest planet?\nA: Jupiter\n"
        "Q: Who?\nA:",
    ),
    "cloze": ({"text": "He sat down on the"}, "He sat down on the"),
    "classify": ({"text": "The film was"}, "The film was very"),
}


def test_the_forms_of_the_package_write_these_prompts() -> None:
    assert set(form_names()) == PROMPTS.keys()
    for name, (fields, prompt) in PROMPTS.items():
        form = read_form(name)
        assert form.fields == tuple(fields)
        assert form.render(fields) == prompt
        assert (form.name, "\n" in form.description) == (name, False)


def test_the_papers_numbers_are_in_the_forms() -> None:
    summary, translation = read_form("summarize"), read_form("translate")
    assert (summary.options.top_k, summary.options.max_new_tokens, summary.options.do_sample) == (2, 100, None)
    assert (summary.answer.kind, summary.answer.count) == ("sentences", 3)
    assert (translation.options.do_sample, translation.answer.kind, translation.answer.count) == (False, "sentences", 1)
    assert read_form("qa").options.do_sample is False
    assert read_form("classify").answer.labels == {"positive": " positive", "negative": " negative"}
    cloze = read_form("cloze").answer
    assert cloze.ends == (".", "!", "?")
    assert {"the", "him", "don't"} <= cloze.stop_words


def test_a_copy_of_a_form_is_the_form_again(tmp_path: Path) -> None:
    for name in form_names():
        path = tmp_path / f"{name}.toml"
        path.write_text(form_text(name), encoding="utf-8")
        copy, own = read_form(path), read_form(name)
        assert copy.name == str(path)
        assert (copy.prompt, copy.examples, copy.options, copy.answer) == (
            own.prompt, own.examples, own.options, own.answer
        )  # fmt: skip
        assert TaskForm.from_dict(tomllib.loads(form_text(name)), name=name) == own


SMALL: dict[str, Any] = {"description": "d", "prompt": "{text}", "answer": {"kind": "text"}}


def test_braces_are_doubled_in_a_template_and_left_alone_in_a_value() -> None:
    form = TaskForm.from_dict(SMALL | {"prompt": "{{a: {text}, b: {other}}}{text}"})
    assert form.fields == ("text", "other")
    assert form.render({"text": "{x}", "other": "}"}) == "{a: {x}, b: }}{x}"


def test_examples_are_written_one_after_another() -> None:
    examples = [{"a": "1", "b": ""}, {"a": "{3}", "b": "4"}]
    form = TaskForm.from_dict(SMALL | {"example": "{a}={b};", "examples": examples})
    assert form.render({"text": "x"}) == "1=;{3}=4;x"


def changed(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in (SMALL | values).items() if value is not None}


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"prompt": None},
         "prompt is missing (accepted: a text with fields such as {text}; {{ and }} stand for braces)"),
        ({"prompt": 5}, "prompt = 5 (accepted: a text with fields"),
        ({"prompt": "no field"}, "prompt names no field (accepted: "),
        ({"prompt": "{text"}, "prompt: expected '}' before end of string (accepted: a text with fields"),
        ({"prompt": "a } b {text}"}, "prompt: Single '}' encountered in format string (accepted: "),
        ({"prompt": "{}"}, "prompt: the field {} is not a name of letters, digits and _ (accepted: "),
        ({"prompt": "{text:>9}"}, "prompt: the field {text:>9} is not a name"),
        ({"prompt": "{text!r}"}, "prompt: the field {text!r} is not a name"),
        ({"prompt": "{text.upper}"}, "prompt: the field {text.upper} is not a name"),
        ({"prompt": "{text[0]}"}, "prompt: the field {text[0]} is not a name"),
        ({"prompt": "{answer}"}, "prompt has the field {answer}, a name that an answer has itself; rename it"),
        ({"description": None}, "description is missing (accepted: a text of one line)"),
        ({"description": "a\nb"}, "description has several lines (accepted: a text of one line)"),
        ({"promt": "x"}, "unknown key promt (accepted: description, prompt, example, examples, answer, options)"),
        ({"options": {"logit_bias": {"5": 1.0}}}, "options.logit_bias would have no effect"),
        ({"answer": {"kind": "label", "labels": {"a": " x", "b": " x"}}}, "whose texts differ"),
        ({"answer": {"kind": "label", "labels": {"": " x", "b": " y"}}}, "none without a name"),
        ({"answer": {"kind": "label", "labels": {"a": " x", "b": " y"}, "c": 1}},
         "unknown key answer.c (accepted: kind, labels, normalize)"),
        ({"example": "{a}"}, 'examples is missing (accepted: tables with the fields of "example")'),
        ({"examples": [{"a": "b"}]}, "example is missing (accepted: a text with fields"),
        ({"example": "{a}", "examples": []}, 'examples = [] (accepted: tables with the fields of "example")'),
        ({"example": "{a} {b}", "examples": [{"a": "x"}]}, "examples[0].b is missing (accepted: a text)"),
        ({"example": "{a}", "examples": [{"a": "x"}, {"a": 1}]}, "examples[1].a = 1 (accepted: a text)"),
        ({"example": "{a}", "examples": [{"a": "x", "c": "y"}]}, "unknown key examples[0].c (accepted: a)"),
        ({"answer": None}, "answer is missing (accepted: a table)"),
        ({"answer": "line"}, "answer = 'line' (accepted: a table)"),
        ({"answer": {}}, "answer.kind is missing (accepted: text, line, sentences, words, last_word, label)"),
        ({"answer": {"kind": "lines"}}, "answer.kind = 'lines' (accepted: text, line, "),
        ({"answer": {"kind": "line", "count": 2}}, "unknown key answer.count (accepted: kind)"),
        ({"answer": {"kind": "words", "count": 0}}, "answer.count = 0 (accepted: an integer of 1 or more)"),
        ({"answer": {"kind": "words", "count": True}}, "answer.count = True (accepted: an integer of 1 or more)"),
        ({"answer": {"kind": "label"}}, "answer.labels is missing (accepted: a table)"),
        ({"answer": {"kind": "label", "labels": {"a": " a"}}}, "answer.labels = {'a': ' a'} (accepted: a table"),
        ({"answer": {"kind": "label", "labels": {"a": " a", "b": ""}}}, "answer.labels.b = '' (accepted: a text, as"),
        ({"answer": {"kind": "label", "labels": {"a": " a", "b": " b"}, "normalize": "mean"}},
         "answer.normalize = 'mean' (accepted: tokens, bytes, none)"),
        ({"answer": {"kind": "last_word", "ends": [""]}}, "answer.ends = [''] (accepted: a list of texts, none"),
        ({"answer": {"kind": "last_word", "stop_words": "the"}}, "answer.stop_words = 'the' (accepted: a list"),
        ({"options": []}, "options = [] (accepted: a table)"),
        ({"options": {"top_k": "two"}}, "options.top_k = 'two' (accepted: an integer of 0 or more)"),
        ({"options": {"max_tokens": 3}}, "options.max_tokens is not an option; did you mean max_new_tokens?"),
        ({"options": {"logprobs": 3}}, "options.logprobs would have no effect (accepted: do_sample, temperature, "),
        ({"options": {"seed": 3}}, "options.seed would have no effect (accepted: "),
        ({"options": {"do_sample": False, "top_k": 3}}, "options: top_k = 3 would have no effect with do_sample"),
        ({"options": {"top_k": 3}, "answer": {"kind": "last_word"}},
         "options.top_k would have no effect (accepted: max_new_tokens, context_overflow, keep_tokens)"),
        ({"options": {"context_overflow": "slide"}, "answer": {"kind": "last_word"}},
         "options.context_overflow = 'slide' (accepted: error, truncate, where nothing is generated)"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_key_its_value_and_what_is_accepted(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(FormError) as caught:
        TaskForm.from_dict(changed(**values), name="mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml has faults: ")
    assert fault in message
    assert ";" not in message.replace("{text}; {{", "").replace("; did you mean", "").replace("itself; rename", "")


def test_all_faults_of_a_file_are_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('prompt = "x"\nextra = 1\n[options]\ntop_k = -1\n[answer]\nkind = "y"\n')
    with pytest.raises(FormError) as caught:
        read_form(path)
    for part in (
        str(path), "description is missing", "prompt names no field", "unknown key extra", "options.top_k = -1",
        "answer.kind = 'y'",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_forms(tmp_path: Path) -> None:
    for data, reason in (
        (b"prompt = ", "is not readable TOML: "),
        (b"a = 1\na = 2", "is not readable TOML: "),
        (b"\xff", "is not UTF-8 text"),
    ):
        (tmp_path / "mine.toml").write_bytes(data)
        with pytest.raises(FormError, match=reason) as caught:
            read_form(tmp_path / "mine.toml")
        assert str(caught.value).startswith(str(tmp_path / "mine.toml"))
        assert "\n" not in str(caught.value)
    with pytest.raises(FormError, match="not a plain file"):
        read_form(tmp_path)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("sumarize",
         "there is no form 'sumarize' (accepted: classify, cloze, qa, summarize, translate, or the path of a file"),
        ("", "there is no form ''"),
        ("mine.toml", "mine.toml does not exist; expected a TOML file with the form of a task"),
        ("./mine", "mine does not exist"),
    ],
)  # fmt: skip
def test_a_form_that_is_not_there(source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormNotFoundError) as caught:
        read_form(source)
    assert reason in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_values_that_are_no_form() -> None:
    with pytest.raises(FormError, match=r"^form = 5 \(accepted: the name of a form, or the path of a file\)$"):
        read_form(5)  # type: ignore[arg-type]
    with pytest.raises(FormError, match=r"^mine = \['a'\] \(accepted: a mapping of the keys of a form\)$"):
        TaskForm.from_dict(["a"], name="mine")  # type: ignore[arg-type]


def test_a_name_is_a_form_of_the_package_and_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qa", "qa.toml"):
        (tmp_path / name).write_text('description = "mine"\nprompt = "{text}"\n[answer]\nkind = "line"\n')
    assert read_form("qa").fields == ("question",)
    for source in ("./qa", "qa.toml", tmp_path / "qa"):
        assert read_form(source).description == "mine"
