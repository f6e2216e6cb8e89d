"""The commands that write text: options and their errors, files of prompts, chat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ortgpt
from ortgpt import GenerationOptions
from ortgpt.cli.main import main
from ortgpt.cli.options import read_options
from ortgpt.cli.text import generate

ROOT = Path(__file__).parents[2]


def run(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def values_of(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (["--min-p", "0.1", "--seed", "3"], {"min_p": 0.1, "seed": 3}),
        (["--typical-p", "0.5", "--seed", "3"], {"typical_p": 0.5, "seed": 3}),
        (["--presence-penalty", "0.5", "--frequency-penalty", "2"], {"presence_penalty": 0.5, "frequency_penalty": 2}),
        (["--no-repeat-ngram-size", "1"], {"no_repeat_ngram_size": 1}),
        (["--bad-words", "e", "--bad-words", " the"], {"bad_words": ["e", " the"]}),
        (["--suppress-tokens", "5", "--suppress-tokens", "6"], {"suppress_tokens": [5, 6]}),
        (["--logit-bias", "5=20", "--logit-bias", "6=-1.5"], {"logit_bias": {5: 20.0, 6: -1.5}}),
        (["--eos-token-id", "7", "--eos-token-id", "9"], {"eos_token_id": [7, 9]}),
        (["--context-overflow", "slide", "--slide-tokens", "5", "--keep-tokens", "2", "--max-new-tokens", "90"],
         {"context_overflow": "slide", "slide_tokens": 5, "keep_tokens": 2, "max_new_tokens": 90}),
        (["--prompt-lookup", "5"], {"prompt_lookup_num_tokens": 5}),
        (["--grammar-regex", "[a-z]{4}"], {"grammar": "[a-z]{4}"}),
        (["--grammar-choice", "yes", "--grammar-choice", "no"], {"grammar": ["yes", "no"]}),
        (["--grammar-json-schema", '{"type": "boolean"}'], {"grammar": {"type": "boolean"}}),
        (["--deterministic"], {"deterministic": True}),
        (["--timeout", "100"], {"timeout_s": 100}),
        (["--num-beams", "3", "--length-penalty", "0.5", "--early-stopping", "never"],
         {"num_beams": 3, "length_penalty": 0.5, "early_stopping": "never"}),
        (["--num-return-sequences", "3", "--seed", "1"], {"num_return_sequences": 3, "seed": 1}),
        (["--logprobs", "2"], {"logprobs": 2}),
    ],
)  # fmt: skip
def test_generate_passes_every_option_on(
    small_bundle: Path, small: ortgpt.Generator, args: list[str], options: dict[str, Any]
) -> None:
    want = small.generate_batch(["a man"], **{"max_new_tokens": 30, **options})
    found = values_of(run("generate", small_bundle, "a man", "--json", "--max-new-tokens", "30", *args))
    assert [each["token_ids"] for each in found] == [each.token_ids for each in want]
    assert [each["text"] for each in found] == [each.text for each in want]
    for value, each in zip(found, want, strict=True):
        assert ("score" in value) is (each.score is not None)
        logprobs = [(entry["token_id"], entry["logprob"]) for entry in value.get("logprobs", [])]
        assert logprobs == [(entry.token_id, entry.logprob) for entry in each.logprobs or []]


def test_every_option_of_a_call_is_on_the_command_line() -> None:
    """But those that only a program can give."""
    known = {parameter.name for parameter in generate.params}
    elsewhere = {"do_sample": "greedy", "assistant_model": "assistant", "grammar": "grammar_regex"}
    programs = {"logits_processor", "cancel", "pad_token_id"}
    names = {elsewhere.get(name, name) for name in GenerationOptions.__dataclass_fields__ if name not in programs}
    assert names <= known


def test_several_continuations_and_logprobs_as_text(small_bundle: Path, small: ortgpt.Generator) -> None:
    want = small.generate_batch(["a man"], num_return_sequences=2, seed=1, max_new_tokens=6)
    shown = run(
        "generate", small_bundle, "a man", "--num-return-sequences", "2", "--seed", "1", "--max-new-tokens", "6"
    )
    assert shown.stdout == f"{want[0].text}\n---\n{want[1].text}\n"
    shown = run("generate", small_bundle, "a man", "--logprobs", "2", "--echo", "--max-new-tokens", "6")
    done = small.generate("a man", max_new_tokens=6, logprobs=2)
    assert shown.stdout == f"a man{done.text}\n"
    rows = shown.stderr.splitlines()
    assert len(rows) == done.prompt_tokens + 6
    assert done.logprobs is not None
    for row, each in zip(rows[done.prompt_tokens :], done.logprobs, strict=True):
        assert row.startswith(repr(small.tokenizer.decode([each.token_id])))
        assert f" {each.logprob:.3f}   " in row


def test_an_assistant_by_its_path(small_bundle: Path, small: ortgpt.Generator) -> None:
    found = values_of(
        run("generate", small_bundle, "a", "--assistant", small_bundle, "--assistant-tokens", "3", "--json")
    )
    assert found[0]["token_ids"] == small.generate("a").token_ids


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--logit-bias", "5"], ["--logit-bias '5'", "ID=NUMBER"]),
        (["--grammar-regex", "a", "--grammar-choice", "b"], ["exclude each other"]),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], ["a token id twice"]),
        (["--grammar-json-schema", "{bad"], ["not JSON", "accepted: a JSON object"]),
        (["--grammar-json-schema", "[1]"], ["'[1]' is not a file", "accepted: a JSON object"]),
        (["--grammar-regex", "("], ["is not accepted"]),
        (["--num-beams", "0"], ["--num-beams = 0"]),
        (["--early-stopping", "soon", "--num-beams", "2"], ["--early-stopping = 'soon'", '"never"']),
        (["--output", "x.jsonl"], ["--output needs --input"]),
        (["--strict"], ["--strict needs --input"]),
        (["a", "--input-format", "text"], ["--input-format needs --input"]),
        (["a", "--input", "x.jsonl", "--output", "y"], ["PROMPT cannot be combined with --input"]),
        (["--input", "x.jsonl", "--echo"], ["--echo cannot be combined with --input"]),
        (["--greedy", "--seed", "3"], ["--seed = 3 would have no effect with --greedy"]),
        (["--assistant-tokens", "3"], ["--assistant-tokens = 3 would have no effect without an --assistant"]),
        (["--suppress-tokens", "300"], ["--suppress-tokens = 300 is not in the vocabulary"]),
        (["--timeout", "0"], ["--timeout = 0.0"]),
        (["--stop", ""], ["--stop = "]),
        (["--num-return-sequences", "2"], ["identical texts"]),
    ],
)
def test_bad_options_get_one_line(small_bundle: Path, tmp_path: Path, args: list[str], parts: list[str]) -> None:
    result = run("generate", small_bundle, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]


def test_a_file_of_prompts(small_bundle: Path, small: ortgpt.Generator, tmp_path: Path) -> None:
    prompts: list[Any] = ["It is", [5, 6, 7], {"prompt": "a man", "max_new_tokens": 3}, {"prompt": "", "seed": 4}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(each) for each in prompts) + "\n\n")
    args = ("generate", small_bundle, "--input", source, "--output", target, "--max-new-tokens", "8")
    done = run(*args)
    assert (done.exit_code, done.stdout) == (0, "")
    whole = target.read_bytes()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3, 4]
    assert [record["prompt"] for record in records] == ["It is", [5, 6, 7], "a man", ""]
    own: list[dict[str, Any]] = [{}, {}, {"max_new_tokens": 3}, {"seed": 4}]
    for record, options in zip(records, own, strict=True):
        want = small.generate(record["prompt"], **{"max_new_tokens": 8} | options)
        assert (record["token_ids"], record["text"]) == (want.token_ids, want.text)
    # Gone on with, wherever it was cut.
    first = whole.index(b"\n")
    for size in (0, 1, first, first + 1, len(whole) // 2, len(whole) - 1, len(whole)):
        target.write_bytes(whole[:size])
        assert run(*args).exit_code == 0
        again = [json.loads(line) for line in target.read_bytes().splitlines()]
        assert [each["token_ids"] for each in again] == [each["token_ids"] for each in records]
    streamed = run(*args[:4], *args[6:])  # without --output
    assert [json.loads(line)["token_ids"] for line in streamed.stdout.splitlines()] == [
        record["token_ids"] for record in records
    ]
    for changed in ((*args, "--seed", "1"), (*args[:-1], "9")):
        refused = run(*changed)
        assert (refused.exit_code, "from other prompts, options or weights" in refused.stderr) == (2, True)
    source.write_text('"another"\n')
    assert run(*args).exit_code == 2
    assert target.read_bytes() == whole
    target.write_text("notes of somebody, without an end of line")
    assert "that this command did not write" in run(*args).stderr
    assert target.read_text().startswith("notes")


def test_odd_lines_of_a_file_of_prompts(small_bundle: Path, small: ortgpt.Generator, tmp_path: Path) -> None:
    """A byte-order mark, CRLF, separators of lines that JSON does not know, ids as texts."""
    source = tmp_path / "in.jsonl"
    text = "a\u2028b\x85c"
    source.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(text, ensure_ascii=False).encode() + b"\r\n"
        + b'{"prompt": "a", "logit_bias": {"5": 100}}\r\n'
    )  # fmt: skip
    found = values_of(run("generate", small_bundle, "--input", source, "--max-new-tokens", "3"))
    assert [each["prompt"] for each in found] == [text, "a"]
    assert found[0]["token_ids"] == small.generate(text, max_new_tokens=3).token_ids
    assert found[1]["token_ids"] == [5, 5, 5]


def test_several_continuations_of_a_file_of_prompts(small_bundle: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"a"\n"b"\n')
    args = ("generate", small_bundle, "--input", source, "--output", target, "--num-return-sequences", "3", "--seed",
            "1", "--max-new-tokens", "4")  # fmt: skip
    assert run(*args).exit_code == 0
    lines = target.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["line"] for line in lines] == [1, 1, 1, 2, 2, 2]
    target.write_bytes(b"".join(lines[:5]))  # the second prompt's third is missing
    assert run(*args).exit_code == 0
    texts = [json.loads(line)["text"] for line in target.read_bytes().splitlines()]
    assert texts == [json.loads(line)["text"] for line in lines]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{bad", "line 2: not JSON"),
        ("5", "line 2: prompt = 5"),
        ('{"text": "a"}', 'line 2: no "prompt"'),
        ('{"prompt": "a", "topk": 1}', "line 2: unknown option topk"),
        ('{"prompt": "a", "top_p": 2}', "line 2: --top-p = 2"),
        ('{"prompt": "a", "max_new_tokens": 64}', "line 2: a prompt of 1 tokens and 64 new ones exceed"),
        ("[" * 100000, "line 2: not JSON"),
    ],
)
def test_a_strict_run_names_a_bad_line_first(small_bundle: Path, tmp_path: Path, line: str, part: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'"a"\n{line}\n')
    result = run("generate", small_bundle, "--input", source, "--output", target, "--strict")
    assert result.exit_code in (1, 2)
    assert part in result.stderr
    assert not target.exists()


def test_chat(small_bundle: Path, small: ortgpt.Generator, tmp_path: Path) -> None:
    saved = tmp_path / "text.txt"
    lines = [
        "It is",
        " a",
        "/again",
        "/rewind 9",
        "/rewind",
        "/text",
        "",
        "/newline",
        f"/save {saved}",
        "/what",
        "/quit",
    ]
    result = run("chat", small_bundle, "--max-new-tokens", "5", "--seed", "3", stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    talk = small.conversation()
    options: dict[str, Any] = {"max_new_tokens": 5}
    first = talk.generate("It is", seed=3, **options).text
    second = talk.generate(" a", seed=4, **options).text
    talk.rewind()
    third = talk.generate(" a", seed=5, **options).text
    talk.rewind()
    text = talk.text
    fourth = talk.generate("", seed=6, **options).text
    fifth = talk.generate("\n", seed=7, **options).text
    assert result.stdout == "".join(f"{each}\n" for each in (first, second, third, text, fourth, fifth))
    assert saved.read_text() == talk.text
    assert "\nturns = 9 (accepted: 1 to 2" in result.stderr
    assert result.stderr.count("Ctrl-C stops it") == 1
    wrong = "/what is not a command, or lacks its argument (accepted: /rewind [N], /again, /newline, /text, /save FILE,"
    assert wrong in result.stderr
    again = run("chat", small_bundle, "--max-new-tokens", "3", stdin="It is\n a\n/rewind\n/again\n/text\n/rewind x\n")
    assert again.stdout.splitlines()[-1] == "It is" + small.generate("It is", max_new_tokens=3).text
    assert "/rewind x (accepted: a number" in again.stderr
    assert run("chat", small_bundle, "--temperature", "-1", stdin="x\n").exit_code == 2
    # What does not fit ends no chat.
    long = run("chat", small_bundle, "a", "--max-new-tokens", "40", stdin="b\n/text\n")
    assert "exceed the context" in long.stderr
    assert long.stdout.splitlines()[-1].startswith("a")


@pytest.mark.skipif(sys.platform == "win32", reason="there, a program cannot send Ctrl-C to one process alone")
@pytest.mark.parametrize("prompt", [["a"], ["--input"]])
def test_ctrl_c_ends_in_one_line(small_bundle: Path, tmp_path: Path, prompt: list[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"a"\n' * 100_000)
    args = [str(source), "--output", str(target)] if prompt == ["--input"] else ["--max-new-tokens", "1000000"]
    slide = ["--context-overflow", "slide"]
    command = [sys.executable, "-m", "ortgpt", "generate", str(small_bundle), *prompt, *args, *slide]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    if prompt == ["a"]:
        assert process.stdout is not None
        assert process.stdout.read(1)
    else:
        while not (target.exists() and target.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.decode().rstrip().endswith("interrupted")
    assert "Traceback" not in stderr.decode()
    if prompt == ["--input"]:
        assert target.read_bytes().endswith(b"\n")


def test_options_that_were_not_given_are_left_out() -> None:
    assert read_options({"top_k": None, "stop": (), "greedy": False, "seed": 0}) == {"seed": 0}


def test_a_line_with_half_a_character_is_continued(small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('"a \\ud800 man"\n', encoding="utf-8")
    done = run("generate", small_bundle, "--input", tmp_path / "in.jsonl", "--max-new-tokens", "2")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["prompt"], len(record["token_ids"])) == ("a \ud800 man", 2)
    assert record["timings"]["tokenize_s"] > 0
