"""The likeliest last word, against all words of a small vocabulary, each computed whole by `transformers`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import ortgpt
from ortgpt.decode import path_search
from ortgpt.errors import PromptError
from ortgpt.tasks import TaskForm, last_word, run_task
from ortgpt.tasks.last_word import LastWords
from support import write_checkpoint

PROMPTS = ["It is a truth", "however little known", "of some one or other of their"]


def form(*, ends: Iterable[str] = (), stop_words: Iterable[str] = ()) -> TaskForm:
    answer = {"kind": "last_word", "ends": [*ends], "stop_words": [*stop_words]}
    return TaskForm.from_dict({"description": "d", "prompt": "{text}", "answer": answer})


def all_words(generator: ortgpt.Generator, model: Any, prompt: str, ends: list[str]) -> list[tuple[float, str]]:
    """Return every word of one or two tokens that may follow, with its log-probability, the likeliest first."""
    ids, eos = generator.tokenizer.encode(prompt), 0
    texts = {i: generator.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(300) if i != eos}
    is_word = re.compile(r"^ ([^\W_]+(?:['’-][^\W_]+)*)$")

    def may_follow(token_id: int) -> bool:
        text = texts.get(token_id)
        if text is None:
            return True  # the end of the text
        if ends:
            return text.startswith(tuple(ends))
        return "\ufffd" not in text[0] and not re.match(r"[^\W_]|['’-]", text)

    after = [token_id for token_id in range(300) if may_follow(token_id)]
    firsts = [[token_id] for token_id, text in texts.items() if text.startswith(" ")]
    paths = firsts + [[*first, second] for first in firsts for second in texts]
    paths = [
        path for path in paths
        if is_word.match(b"".join(map(generator.tokenizer.token_bytes, path)).decode("utf-8", "replace"))
    ]  # fmt: skip
    found = []
    with torch.no_grad():
        for length in (1, 2):
            rows = [[*ids, *path] for path in paths if len(path) == length]
            logprobs = torch.log_softmax(model(torch.tensor(rows)).logits.double(), -1)
            for row, logprob in zip(rows, logprobs, strict=True):
                score = sum(float(logprob[place - 1, row[place]]) for place in range(len(ids), len(row)))
                score += float(torch.logsumexp(logprob[-1, after], 0))
                found.append((score, generator.tokenizer.decode(row[len(ids) :])[1:]))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("ends", [[], [".", "!", "?"]], ids=["any end", "a sentence's end"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_word_is_the_likeliest_of_all(
    small: ortgpt.Generator, small_model: Any, prompt: str, ends: list[str]
) -> None:
    words = all_words(small, small_model, prompt, ends)
    assert len(words) > 1000
    for count in (0, 1, 5):  # how many of the likeliest words are stop words
        stop_words = {word.lower() for _, word in words[:count]}
        logprob, best = next(each for each in words if each[1].lower() not in stop_words)
        result = run_task(small, form(ends=ends, stop_words=stop_words), prompt, max_new_tokens=2)
        assert (result.answer, result.is_likeliest, result.completion) == (best, True, None)
        assert result.logprob == pytest.approx(logprob, abs=1e-4)


def test_white_space_at_the_end_changes_nothing(small: ortgpt.Generator) -> None:
    plain, spaced = (run_task(small, form(), text) for text in (PROMPTS[0], f"{PROMPTS[0]} \n"))
    assert (plain.answer, plain.logprob, plain.prompt) == (spaced.answer, spaced.logprob, spaced.prompt)


def test_a_portable_bundle_finds_the_same(small: ortgpt.Generator, small_portable: ortgpt.Generator) -> None:
    for prompt in PROMPTS:
        native, portable = (run_task(each, form(), prompt) for each in (small, small_portable))
        assert native.answer == portable.answer
        assert native.logprob == pytest.approx(portable.logprob, abs=1e-3)


def test_a_word_may_have_any_number_of_tokens(austen: ortgpt.Generator) -> None:
    stop_words = {"a", "the"}
    long, short = (run_task(austen, form(stop_words=stop_words), "He is a", max_new_tokens=n) for n in (8, 1))
    assert len(austen.tokenizer.encode(" " + short.answer)) == 1
    assert long.logprob is not None
    assert short.logprob is not None
    assert long.logprob >= short.logprob


@pytest.fixture(scope="module")
def austen() -> Any:
    with ortgpt.load("austen") as generator:
        yield generator


def test_a_search_that_ends_early_says_so(
    small: ortgpt.Generator, small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = all_words(small, small_model, PROMPTS[0], [])
    stop_words = {word.lower() for _, word in words[:30]}
    monkeypatch.setattr(last_word, "MAX_STEPS", 3)
    early = run_task(small, form(stop_words=stop_words), PROMPTS[0], max_new_tokens=2)
    assert early.is_likeliest is False
    monkeypatch.undo()
    late = run_task(small, form(stop_words=stop_words), PROMPTS[0], max_new_tokens=2)
    assert late.is_likeliest is True
    assert late.logprob is not None
    assert early.logprob is None or early.logprob <= late.logprob


def test_the_sum_of_nothing_is_impossible() -> None:
    import numpy as np

    assert path_search._log_sum(np.array([])) == -math.inf
    assert path_search._log_sum(np.log([0.25, 0.5])) == pytest.approx(math.log(0.75))


@pytest.mark.parametrize(
    ("data", "goes_on", "ends"),
    [
        (b" ", True, False),
        (" café".encode(), True, True),
        (" café".encode()[:-1], True, False),  # half a character
        (b" \xff", False, False),
        (" can’t".encode(), True, True),
        (b" don'", True, False),
        (b" don'-", False, False),
        (b" 'tis", False, False),
        (" —".encode(), False, False),
        (b" Well-known", True, True),
        (b" The", True, False),  # a stop word, of which more may follow
        (" Don’t".encode(), True, False),
    ],
)
def test_what_a_word_is(small: ortgpt.Generator, data: bytes, goes_on: bool, ends: bool) -> None:
    words = last_word.LastWords(small, {"the", "don't"}, ())
    by_byte = {small.tokenizer.token_bytes(token_id): token_id for token_id in range(1, 300)}
    ids = [by_byte[data[place : place + 1]] for place in range(len(data))]
    assert words._rules.may_continue(ids) is goes_on
    assert words._rules.may_end(ids) is ends
    if ends:
        assert words._rules.begins[ids[0]]
        assert all(words._rules.continues[token_id] for token_id in ids[1:])


def test_which_tokens_end_a_word(small: ortgpt.Generator) -> None:
    texts = {token_id: small.tokenizer.token_bytes(token_id) for token_id in range(1, 300)}
    any_end = last_word.LastWords(small, (), ())._rules.ends
    ended = {texts[token_id] for token_id in range(1, 300) if any_end[token_id]}
    assert {b" ", b".", b",", b"\n", b'"', b"("} <= ended
    assert not {b"a", b"9", b"'", b"-", b"\xc3", b"\xa9", "’".encode()} & ended
    assert any_end[0]  # the end of the text
    marked = last_word.LastWords(small, (), (".", "!"))._rules.ends
    assert all(marked[token_id] == (data[:1] in (b".", b"!")) for token_id, data in texts.items())
    assert {b".", b"!"} <= {*texts.values()}


def test_no_bytes_no_last_word(tmp_path_factory: pytest.TempPathFactory) -> None:
    from ortgpt_exporter import export_bundle

    folder = tmp_path_factory.mktemp("word_pieces")
    bundle = export_bundle(_word_pieces(folder / "checkpoint"), folder / "bundle").path
    with (
        ortgpt.load(bundle) as generator,
        pytest.raises(ortgpt.PromptError, match="whose tokens are bytes, as GPT-2's"),
    ):
        run_task(generator, form(), "it is")


def _word_pieces(folder: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    write_checkpoint(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(["it is a truth universally acknowledged"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_what_begins_no_token_ends_no_word(small: ortgpt.Generator) -> None:
    with pytest.raises(PromptError, match=r"ends: '日本x' begins no token of .*; name what one begins with"):
        run_task(small, form(ends=[".", "日本x"]), "It is a")


def test_a_word_that_a_period_only_shortens_is_no_last_word(austen: Any) -> None:
    assert run_task(austen, "cloze", "He is").answer not in ("Mr", "Mrs", "")  # "Mr" is what a period follows best
    titles = LastWords(austen, (), (".",)), LastWords(austen, (), ())
    words = (" Mr", " Mrs", " J", " I", " man")
    found = [[each._may_end(austen.tokenizer.encode(word)) for word in words] for each in titles]
    assert found == [[False, False, False, True, True], [True] * 5]
