"""Files of prompts: a line's fault is that line's result, keys of its own come back, OpenAI's lines and plain text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import GPT2LMHeadModel

import ortgpt
from ortgpt import request
from ortgpt.cli.main import main
from ortgpt.options.generation_options import OPTIONS
from ortgpt.options.names import is_like_an_option
from support import reseal


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def write(path: Path, *lines: Any) -> Path:
    """Write values as lines of JSON, texts that begin with "raw:" as they are."""
    rows = [line[4:] if isinstance(line, str) and line.startswith("raw:") else json.dumps(line) for line in lines]
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def records_of(result: Result, *, code: int = 0) -> list[dict[str, Any]]:
    assert result.exit_code == code, result.stderr
    return [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in result.stdout.splitlines()
    ]


def test_a_lines_fault_is_that_lines_result(small_bundle: Path, small: ortgpt.Generator, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": 1, "prompt": "a man"},
        {"id": 2, "prompt": [5] * 100},
        "raw:{bad",
        {"id": 4, "prompt": "a", "topk": 1},
        {"id": 5, "prompt": "a", "top_p": 2},
        {"id": 6, "prompt": [999]},
        {"id": 7},
        {"id": 8, "prompt": "a", "grammar": "("},
        "raw:" + "[" * 100_000,
        5,
        {"id": 11, "prompt": "a man"},
    )
    result = run("generate", small_bundle, "--input", source, "--max-new-tokens", "5")
    records = records_of(result, code=1)
    assert [record["line"] for record in records] == [*range(1, 12)]
    want = small.generate("a man", max_new_tokens=5)
    for record in (records[0], records[10]):
        assert (record["text"], record["token_ids"], "error" in record) == (want.text, want.token_ids, False)
    errors = {record["line"]: (record["error"]["type"], record["error"]["message"]) for record in records[1:10]}
    for line, (kind, part) in {
        2: ("ContextLengthError", "a prompt of 100 tokens and 5 new ones exceed"),
        3: ("PromptError", "--input-format text"),
        4: ("UnknownOptionError", "unknown option topk; did you mean top_k?"),
        5: ("OptionError", "top_p = 2 (accepted"),
        6: ("PromptError", "token id 999 is not in the vocabulary"),
        7: ("PromptError", 'no "prompt"'),
        8: ("OptionError", "grammar = '(' is not accepted"),
        9: ("PromptError", "not JSON: more than 100 lists"),
        10: ("PromptError", "prompt = 5 (accepted: a text, or a list of token ids)"),
    }.items():
        assert errors[line][0] == kind
        assert part in errors[line][1]
    assert [record.get("id") for record in records] == [1, 2, None, 4, 5, 6, 7, 8, None, None, 11]
    assert [record["prompt"] for record in records[1:4]] == [[5] * 100, None, "a"]
    assert f"9 of 11 prompts failed, as their records say: {source} lines 2, 3, 4, 5, 6, 7, 8, 9, 10\n" in result.stderr


def test_a_fault_of_the_command_line_is_not_one_of_each_line(small_bundle: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl"
    for flags, part in (
        (("--greedy", "--top-k", "5"), "--top-k = 5 would have no effect"),
        (("--grammar-regex", "("), "is not accepted"),
        (("--max-new-tokens", "64"), "64 new ones exceed"),
    ):
        result = run("generate", small_bundle, "--input", source, "--output", target, *flags)
        assert (result.exit_code in (1, 2), result.stdout, part in result.stderr) == (True, "", True)
        assert not target.exists()
    # Lines that bring what the command line lacks are fine.
    write(source, {"prompt": "a", "context_overflow": "truncate"})
    assert run("generate", small_bundle, "--input", source, "--keep-tokens", "3").exit_code == 0


def test_keys_of_its_own_come_back(small_bundle: Path, tmp_path: Path) -> None:
    own = {"id": "a-7", "custom_id": "r1", "metadata": {"b": [1, None]}, "topic": "x", "source": "y", "label": 3}
    source = write(
        tmp_path / "in.jsonl", {"prompt": "a", **own}, {"prompt": "a", "text": 1, "id": 2},
        'raw:{"prompt": "a", "metadata": [1e999, -1e999]}',
    )  # fmt: skip
    records = records_of(run("generate", small_bundle, "--input", source, "--max-new-tokens", "2"), code=1)
    assert records[0].items() >= own.items()
    assert records[1]["id"] == 2
    assert '"text" is a name that the record itself has' in records[1]["error"]["message"]
    assert records[2]["metadata"] == [None, None]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("id", False), ("custom_id", False), ("metadata", False), ("topic", False), ("source", False), ("index", False),
        ("tokens", False), ("length", False), ("seed_id", False), ("top", False), ("title", False), ("model", False),
        ("category", False), ("user", False), ("url", False),
        ("temprature", True), ("topP", True), ("top-k", True), ("max_tokens", True), ("MaxNewTokens", True),
        ("repetition_penality", True), ("seeds", True), ("stop_sequences", True), ("max_length", True), ("n", True),
    ],
)  # fmt: skip
def test_which_names_are_meant_as_options(name: str, meant: bool) -> None:
    assert is_like_an_option(name, OPTIONS) is meant


def body(**values: Any) -> dict[str, Any]:
    request = {"model": "gpt2", "prompt": "a man"} | values
    return {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": request}


def test_lines_of_an_openai_batch_file(small_bundle: Path, small: ortgpt.Generator, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"max_tokens": 4}, {"max_new_tokens": 4}),
        ({"max_tokens": 4, "temperature": 0, "top_p": 1, "seed": 3}, {"max_new_tokens": 4}),
        ({"max_tokens": 4, "temperature": 0.7, "seed": 3}, {"max_new_tokens": 4, "temperature": 0.7, "seed": 3}),
        ({"n": 1, "best_of": 1, "stream": False, "suffix": None, "user": "me", "echo": False}, {}),
        ({"logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0},
         {"logprobs": 2, "presence_penalty": 0.5}),
        ({"logit_bias": {"5": 100}, "stop": ["zz", "q"]}, {"logit_bias": {5: 100}, "stop": ["zz", "q"]}),
        ({"top_k": 5, "repetition_penalty": 1.2, "seed": 1}, {"top_k": 5, "repetition_penalty": 1.2, "seed": 1}),
    ]  # fmt: skip
    source = write(tmp_path / "in.jsonl", *(body(**values) for values, _ in cases))
    records = records_of(run("generate", small_bundle, "--input", source))
    for record, (_, options) in zip(records, cases, strict=True):
        want = small.generate("a man", **options)
        assert (record["custom_id"], record["prompt"], record["text"]) == ("r", "a man", want.text)
        assert record["token_ids"] == want.token_ids
        assert len(record.get("logprobs", [])) == len(want.logprobs or [])
    write(
        source,
        body(echo=True, max_tokens=3),
        body(echo=True, max_tokens=3, logprobs=1),
        body(n=2, temperature=1, seed=4),
    )
    first, second, *both = records_of(run("generate", small_bundle, "--input", source))
    assert first["text"] == second["text"] == "a man" + small.generate("a man", max_new_tokens=3).text
    assert len(second["prompt_logprobs"]) == first["prompt_tokens"]
    assert [each["text"] for each in both] == [
        each.text for each in small.generate_batch(["a man"], num_return_sequences=2, temperature=1, seed=4)
    ]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ({"custom_id": "r", "url": "/v1/chat/completions", "body": {"messages": []}}, "url = '/v1/chat/completions'"),
        ({"custom_id": "r", "body": {"messages": []}}, 'body has "messages"'),
        ({"custom_id": "r", "messages": []}, "the model has no chat"),
        ({"custom_id": "r", "method": "GET", "body": {"prompt": "a"}}, "method = 'GET'"),
        ({"custom_id": "r", "body": []}, "body = []"),
        ({"custom_id": "r", "body": {}}, 'no "prompt" in body'),
        ({"custom_id": "r", "body": {"prompt": ["a", "b"]}}, "prompt[0] = 'a' (accepted: a token id, 0 to 299)"),
        ({"custom_id": "r", "body": {"prompt": "a", "best_of": 3}}, "unknown option best_of"),
        ({"custom_id": "r", "body": {"prompt": "a", "stream": True}}, "unknown option stream"),
        ({"custom_id": "r", "body": {"prompt": "a", "max_tokens": 3, "max_new_tokens": 3}}, "another name of max_new"),
        ({"custom_id": "r", "body": {"prompt": "a", "max_tokens": 0}}, "max_new_tokens = 0"),
    ],
)
def test_a_batch_line_that_cannot_be_had(small_bundle: Path, tmp_path: Path, line: Any, part: str) -> None:
    source = write(tmp_path / "in.jsonl", line, "a")
    records = records_of(run("generate", small_bundle, "--input", source, "--max-new-tokens", "2"), code=1)
    assert records[0]["custom_id"] == "r"
    assert part in records[0]["error"]["message"]
    assert "text" in records[1]


def test_plain_text_is_read_as_such_where_that_is_certain(
    small_bundle: Path, small: ortgpt.Generator, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_bytes(b"a man\r\n\n  It is \n{not json\n1811\n")
    prompts = ["a man", "  It is ", "{not json", "1811"]
    args = ("generate", small_bundle, "--max-new-tokens", "2", "--input")
    records = records_of(run(*args, text))
    assert [(record["line"], record["prompt"]) for record in records] == list(zip((1, 3, 4, 5), prompts, strict=True))
    assert [record["text"] for record in records] == [small.generate(each, max_new_tokens=2).text for each in prompts]
    other = Path(shutil.copy(text, tmp_path / "in.md"))
    refused = run(*args, other)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "in.md line 1: not JSON" in refused.stderr
    assert "--input-format text, each line is a prompt" in refused.stderr
    assert records_of(run(*args, other, "--input-format", "text")) != []
    doubtful = write(tmp_path / "doubtful.txt", "raw:a man", {"prompt": "a"})
    refused = run(*args, doubtful)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "doubtful.txt line 2 is JSON" in refused.stderr
    records = records_of(run(*args, doubtful, "--input-format", "text"))
    assert [record["prompt"] for record in records] == ["a man", '{"prompt": "a"}']


def test_a_run_with_failures_and_an_assistant_continues(small_bundle: Path, tmp_path: Path) -> None:
    """Each command is a process of its own, in which objects lie elsewhere and sets have another order."""
    source = write(tmp_path / "in.jsonl", "a", {"prompt": [5] * 100, "id": 3}, "It is", {"prompt": "b", "seed": 4}, "c")
    target = tmp_path / "out.jsonl"
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    args: list[str | Path] = [
        sys.executable, "-m", "ortgpt", "generate", small_bundle, "--input", source, "--output", target,
        "--max-new-tokens", "4", "--assistant", small_bundle, "--logit-bias", "5=1", "--logit-bias", "6=-inf",
        "--stop", "zz", "--stop", "q", "--eos-token-id", "7", "--eos-token-id", "9",
    ]  # fmt: skip
    done = subprocess.run(args, capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [("error" in json.loads(line)) for line in lines] == [False, True, False, False, False]
    untimed = [json.loads(line) | {"timings": 0} for line in lines]
    for kept in (whole, b"".join(lines[:1]), b"".join(lines[:2]), b"".join(lines[:2]) + lines[2][:40], lines[0][:9]):
        target.write_bytes(kept)
        done = subprocess.run([*args[:9], *reversed_pairs(args[9:])], capture_output=True, check=False, text=True)
        assert done.returncode == 1, done.stderr
        assert "1 of 5 prompts failed" in done.stderr
        assert [json.loads(line) | {"timings": 0} for line in target.read_bytes().splitlines()] == untimed
    changed = write(source, "a", {"prompt": [5] * 100, "id": 4}, "It is")
    done = subprocess.run(args, capture_output=True, check=False, text=True)
    assert (done.returncode, "from other prompts, options or weights" in done.stderr) == (2, True), changed


def reversed_pairs(flags: list[str | Path]) -> list[str | Path]:
    """Return single flags and their values in another order, and those of a repeated flag in the same."""
    return [*flags[2:4], *flags[:2], *flags[4:]]


def test_logits_that_are_not_finite_fail_one_line_of_many(
    small_bundle: Path, small: ortgpt.Generator, small_model: GPT2LMHeadModel, tmp_path: Path
) -> None:
    """The embedding of position 40 is damaged, so only longer texts see it."""
    bundle = Path(shutil.copytree(small_bundle, tmp_path / "bundle"))
    row = small_model.transformer.wpe.weight[40].detach().numpy()
    for path in bundle.glob("model.onnx*"):
        path.write_bytes(path.read_bytes().replace(row.tobytes(), (row * float("nan")).tobytes()))
    reseal(bundle)
    source = write(tmp_path / "in.jsonl", "a man", {"prompt": [5] * 50, "id": "long"}, "It is")
    result = run("generate", bundle, "--input", source, "--max-new-tokens", "5")
    records = records_of(result, code=1)
    assert [(record["line"], "error" in record) for record in records] == [(1, False), (2, True), (3, False)]
    assert (records[1]["error"]["type"], records[1]["id"]) == ("NonFiniteLogitsError", "long")
    for record in (records[0], records[2]):
        assert record["text"] == small.generate(record["prompt"], max_new_tokens=5).text
    strict = run("generate", bundle, "--input", source, "--max-new-tokens", "5", "--strict")
    assert (strict.exit_code, strict.stdout, "in.jsonl lines 1 to 3" in strict.stderr) == (1, "", True)


def test_a_long_file_is_prepared_as_it_is_written(
    small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Any] = []
    real, target = request.prepare_prompt, tmp_path / "out.jsonl"
    sizes = []

    def noted(*args: Any) -> Any:
        prepared.append(args)
        sizes.append(target.stat().st_size if target.exists() else 0)
        return real(*args)

    monkeypatch.setattr("ortgpt.cli.prompt_files.prepare_prompt", noted)
    source = write(tmp_path / "in.jsonl", *["a"] * 100)
    assert run("generate", small_bundle, "--input", source, "--output", target, "--max-new-tokens", "1").exit_code == 0
    assert len(prepared) == 100
    assert sizes[31] == 0 < sizes[32] < sizes[64] < sizes[96]


def test_a_fault_that_shows_while_a_line_is_computed_is_that_lines(
    small_bundle: Path, small: ortgpt.Generator, tmp_path: Path
) -> None:
    everything = list(range(small.engine.allowed_vocab_size))
    source = write(
        tmp_path / "in.jsonl", "a man", {"prompt": "a man", "suppress_tokens": everything, "eos_token_id": []}, "a man"
    )
    result = run("generate", small_bundle, "--input", source, "--max-new-tokens", "3")
    first, second, third = records_of(result, code=1)
    assert first["token_ids"] == third["token_ids"] == small.generate("a man", max_new_tokens=3).token_ids
    assert second["error"]["type"] == "OptionError"


def test_a_line_that_is_nearly_json_keeps_its_id(small_bundle: Path, tmp_path: Path) -> None:
    lines = ('raw:{"id": 7, "prompt": "a", "w": NaN}', 'raw:{"custom_id": "b", "prompt": "a", "prompt": "b"}', '"a"')
    source = write(tmp_path / "in.jsonl", *lines)
    first, second, _ = records_of(run("generate", small_bundle, "--input", source, "--max-new-tokens", "1"), code=1)
    assert (first["id"], first["error"]["message"]) == (7, "not strict JSON: NaN is not a JSON number")
    assert (second["custom_id"], second["error"]["type"]) == ("b", "PromptError")
    assert "--input-format" not in second["error"]["message"]


def test_a_batch_line_that_sends_the_defaults_is_greedy(
    small_bundle: Path, small: ortgpt.Generator, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", body(prompt="a man", max_tokens=9, top_p=1, presence_penalty=0))
    (record,) = records_of(run("generate", small_bundle, "--input", source))
    assert record["token_ids"] == small.generate("a man", max_new_tokens=9).token_ids


def test_a_cut_chunk_is_computed_again_as_a_whole(small_bundle: Path, tmp_path: Path) -> None:
    """In 8 and 4 bits the lines that are computed together can change a row, so a run continues between chunks."""
    source = write(tmp_path / "in.jsonl", *(f"{number} a man" for number in range(40)))
    out = tmp_path / "out.jsonl"
    command = ("generate", small_bundle, "--input", source, "--output", out, "--max-new-tokens", "2")
    assert run(*command).exit_code == 0
    whole = out.read_bytes()
    for kept, done in ((40, 40), (37, 32), (32, 32), (5, 0)):
        out.write_bytes(b"".join(whole.splitlines(keepends=True)[:kept]))
        result = run(*command)
        assert result.exit_code == 0
        assert (f"has {done} of 40 prompts already" in result.stderr) == (done > 0)
        assert out.read_bytes().count(b"\n") == 40
        assert [json.loads(line)["text"] for line in out.read_bytes().splitlines()] == [
            json.loads(line)["text"] for line in whole.splitlines()
        ]
