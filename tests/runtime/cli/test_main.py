from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import ortgpt
from ortgpt.cli.main import main


def run(*args: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def test_generate_writes_the_text_alone(small_bundle: Path, small: ortgpt.Generator) -> None:
    want = small.generate("It is a truth", max_new_tokens=8)
    result = run("generate", small_bundle, "It is a truth", "--max-new-tokens", "8")
    assert (result.exit_code, result.stdout, result.stderr) == (0, want.text + "\n", "")
    echoed = run("generate", small_bundle, "It is a truth", "--max-new-tokens", "8", "--echo", "--greedy")
    assert echoed.stdout == "It is a truth" + want.text + "\n"
    piped = run("generate", small_bundle, "-", "--max-new-tokens", "8", stdin="It is a truth")
    assert piped.stdout == want.text + "\n"
    afresh = run("generate", small_bundle, "--max-new-tokens", "8")
    assert afresh.stdout == small.generate("", max_new_tokens=8).text + "\n"


def test_generate_passes_every_option_on(small_bundle: Path, small: ortgpt.Generator) -> None:
    want = small.generate(
        "a man", max_new_tokens=30, min_new_tokens=2, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2,
        seed=5, stop=["q", "zz"],
    )  # fmt: skip
    result = run(
        "generate", small_bundle, "a man", "--max-new-tokens", "30", "--min-new-tokens", "2", "--temperature", "0.9",
        "--top-k", "40", "--top-p", "0.9", "--repetition-penalty", "1.2", "--seed", "5", "--stop", "q", "--stop", "zz",
        "--threads", "1", "--device", "cpu", "--json",
    )  # fmt: skip
    values = json.loads(result.stdout)
    assert values["text"] == want.text
    assert values["token_ids"] == want.token_ids
    assert (values["finish_reason"], values["stop_reason"]) == (want.finish_reason, want.stop_reason)
    assert values["prompt_tokens"] == want.prompt_tokens
    assert values["timings"]["prefill_s"] > 0


def test_score(small_bundle: Path, small: ortgpt.Generator, tmp_path: Path) -> None:
    text = "a single man in possession of a good fortune\n" * 9
    (tmp_path / "text.txt").write_text(text)
    want = small.score(text)
    for result in (
        run("score", small_bundle, tmp_path / "text.txt", "--json"),
        run("score", small_bundle, "-", "--json", stdin=text),
        run("score", small_bundle, "--json", stdin=text),
    ):
        assert json.loads(result.stdout) == {
            "perplexity": want.perplexity, "bits_per_byte": want.bits_per_byte, "nll": want.nll, "tokens": want.tokens,
        }  # fmt: skip
    table = run("score", small_bundle, tmp_path / "text.txt").stdout
    assert f"{want.perplexity:,.4f}" in table
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for bad in (run("score", small_bundle, tmp_path / "bad.txt"), run("generate", small_bundle, "-", stdin=b"\xff")):
        assert bad.exit_code == 1
        assert "not UTF-8" in bad.stderr


def test_a_number_that_is_not_finite_is_null(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has neither Infinity nor NaN."""
    score = ortgpt.Score(nll=1e5, tokens=2, text_bytes=1, token_ids=[1, 2], token_logprobs=[-1e5, -math.inf])
    assert score.perplexity == math.inf
    monkeypatch.setattr(ortgpt.Generator, "score", lambda *args, **keywords: score)
    text = run("score", small_bundle, "--json", "--logprobs", stdin="a").stdout
    found = json.loads(text, parse_constant=pytest.fail)
    assert (found["perplexity"], found["nll"], found["token_logprobs"]) == (None, 1e5, [-1e5, None])
    assert "inf" in run("score", small_bundle, stdin="a").stdout


def test_info(small_bundle: Path) -> None:
    values = json.loads(run("info", small_bundle, "--json").stdout)
    assert values["n_layer"] == 2
    assert values["size_bytes"] == sum(
        path.stat().st_size for path in small_bundle.iterdir() if path.name != "ortgpt.json"
    )
    text = run("info", small_bundle).stdout
    assert text.splitlines()[1].split() == ["task", "text-generation"]
    for part in (
        "2 layers, 4 heads, context 64",
        "float32",
        "exact",
        "accepted",
        "ragged batch and 6 steps",
        "1.23.2 or newer",
    ):
        assert part in text


def test_seal(small_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(small_bundle, tmp_path / "bundle"))
    (bundle / "generation_config.json").write_text('{"eos_token_id": 3}')
    refused = run("generate", bundle, "a")
    assert refused.exit_code == 1
    assert "generation_config.json has" in refused.stderr
    assert "generation_config.json changed" in run("seal", bundle).stderr
    assert run("generate", bundle, "a", "--max-new-tokens", "2").exit_code == 0


@pytest.mark.parametrize(
    ("args", "code", "parts"),
    [
        (["generate", "nowhere"], 1, ["nowhere does not exist", "ortgpt export"]),
        (["info", "nowhere"], 1, ["nowhere does not exist"]),
        (["seal", "nowhere"], 1, ["nowhere"]),
        (["generate"], 2, ["Missing argument"]),
        (["generate", "BUNDLE", "--top-p", "7"], 2, ["--top-p = 7.0", "0 to 1"]),
        (["generate", "BUNDLE", "--greedy", "--top-k", "5"], 2, ["--top-k = 5", "no effect with --greedy"]),
        (["generate", "BUNDLE", "--device", "tpu"], 2, ["device = 'tpu'"]),
        (["generate", "BUNDLE", "--max-new-tokens", "x"], 2, ["'x' is not a valid integer"]),
        (["generate", "BUNDLE", "a", "--max-new-tokens", "64"], 1, ["exceed the context of 64 tokens"]),
        (["score", "BUNDLE", "nowhere.txt"], 1, ["nowhere.txt"]),
        (["export", "nowhere", "-o", "out"], 1, ["nowhere does not exist", "austen"]),
        (["export", "austen", "-o", "BUNDLE"], 1, ["already exists"]),
        (["export", "austen", "-o", "out", "--dtype", "int3"], 2, ["int3"]),
        (
            ["export", "austen", "-o", "out", "--target", "cuda", "--dtype", "int8"],
            2,
            ["dtype = 'int8'", "native for cuda"],
        ),
        (["export", "austen", "-o", "out", "--method", "gptq"], 2, ["--method would have no effect", "int8"]),
        (["export", "austen", "-o", "out", "--revision", "v1"], 1, ["revision = 'v1'", "leave it out"]),
        (["export", "owner/", "-o", "out"], 1, ["owner/ does not exist", "hub id"]),
        (["quantize", "BUNDLE", "-o", "out"], 2, ["Missing option '--dtype'"]),
        (["quantize", "BUNDLE", "--dtype", "int4"], 2, ["Missing option '--out'"]),
        (
            ["quantize", "BUNDLE", "--sweep", "--dtype", "int4", "--method", "gptq"],
            2,
            ["--dtype, --method would have no"],
        ),
        (["quantize", "BUNDLE", "--sweep", "--plot", "x.pdf"], 2, ["x.pdf", ".png or .svg"]),
        (["quantize", "BUNDLE", "-o", "out", "--dtype", "int4", "--plot", "x.png"], 2, ["--plot would have no effect"]),
        (["quantize", "BUNDLE", "-o", "out", "--dtype", "int8", "--block-size", "24"], 2, ["block_size = 24"]),
        (["quantize", "BUNDLE", "-o", "out", "--dtype", "int8", "--max-kl", "-1"], 2, ["max_kl = -1.0"]),
        (["quantize", "nowhere", "-o", "out", "--dtype", "int8"], 1, ["nowhere does not exist"]),
        (["train", "nowhere.txt", "-o", "out"], 1, ["nowhere.txt"]),
        (["train", "nowhere.txt", "-o", "out", "--n-embd", "7"], 1, ["n_embd = 7"]),
        (["frobnicate"], 2, ["frobnicate"]),
    ],
)
def test_bad_input_gets_one_line_and_the_right_code(
    small_bundle: Path, args: list[str], code: int, parts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*[small_bundle if arg == "BUNDLE" else arg for arg in args])
    assert result.exit_code == code
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    for part in parts:
        assert part in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_command_without_loading_torch() -> None:
    code = (
        "import sys; from ortgpt.cli.main import main\n"
        "try: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    )
    for args in (["--help"], ["export", "--help"], ["quantize", "--help"], ["train", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-m", "ortgpt", "--help"], capture_output=True, text=True, check=True)
    for command in ("export", "generate", "info", "quantize", "score", "seal", "train"):
        assert f"\n  {command} " in done.stdout


def test_without_the_export_extra_the_pip_command_is_named() -> None:
    for module in ("torch", "onnx_ir", "safetensors", "tokenizers", "huggingface_hub"):
        checkpoint = "owner/name" if module == "huggingface_hub" else "austen"
        code = f"import sys; sys.modules[{module!r}] = None\nfrom ortgpt.cli.main import main; main(sys.argv[1:])"
        args = ["train", "x.txt", "-o", "y"] if module == "tokenizers" else ["export", checkpoint, "-o", "y"]
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        start = f"Error: this command needs {module}, which is not installed; run "
        assert done.stderr.startswith(start)
        assert done.stderr.endswith("[export]'`\n")
        assert done.stderr.count("\n") == 1


def test_export_and_train_end_to_end(tmp_path: Path) -> None:
    from support import TEXT

    (tmp_path / "text.txt").write_text(TEXT * 4, encoding="utf-8")
    trained = run(
        "train", tmp_path / "text.txt", "-o", tmp_path / "checkpoint", "--n-layer", "1", "--n-head", "2", "--n-embd",
        "16", "--n-positions", "32", "--vocab-size", "300", "--steps", "4", "--batch-size", "2",
        "--evaluate-every", "2",
    )  # fmt: skip
    assert trained.exit_code == 0, trained.stderr
    assert trained.stdout == ""
    assert "step 2: held out" in trained.stderr
    exported = run("export", tmp_path / "checkpoint", "-o", tmp_path / "bundle")
    assert exported.exit_code == 0, exported.stderr
    assert exported.stdout == ""
    assert "ragged batch and 6 steps" in exported.stderr
    assert run("generate", tmp_path / "bundle", "a", "--max-new-tokens", "3").exit_code == 0


def test_text_that_the_terminal_cannot_show_is_no_error(small_bundle: Path) -> None:
    for encoding in ("ascii", "cp1252"):
        for args in (["info"], ["info", "--json"], ["generate", "日本 👩", "--echo", "--max-new-tokens", "2"],
                     ["generate", "日本 👩", "--echo", "--json", "--max-new-tokens", "2"]):  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-m", "ortgpt", args[0], str(small_bundle), *args[1:]],
                capture_output=True, check=True, env={"PATH": "", "PYTHONIOENCODING": encoding, "LC_ALL": "C"},
            )  # fmt: skip
            if args[-3:] == ["--echo", "--max-new-tokens", "2"]:
                assert done.stdout.startswith("日本 👩".encode())


def test_quantize_tells_what_it_measured_and_info_shows_it(small_checkpoint: Path, tmp_path: Path) -> None:
    """A quantised bundle by both commands; a nanoGPT file and an adapter reach the exporter by their options."""
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged. " * 9, encoding="utf-8")
    given = ("--dtype", "int8", "--eval", tmp_path / "text.txt", "--block-size", "16", "--max-perplexity-ratio", "1.5")
    one = run("export", small_checkpoint, "-o", tmp_path / "one", *given)
    assert one.exit_code == 0, one.stderr
    float32 = run("export", small_checkpoint, "-o", tmp_path / "float32")
    assert float32.exit_code == 0, float32.stderr
    two = run("quantize", tmp_path / "float32", "-o", tmp_path / "two", *given)
    assert two.exit_code == 0, two.stderr
    for result in (one, two):
        assert result.stdout == ""
        for part in (
            "text.txt",
            "perplexity",
            "KL divergence",
            "matrices: 10 in int8; left out: none",
            "int8  2 layers",
        ):
            assert part in result.stderr
    shown = run("info", tmp_path / "two").stdout
    assert "KL divergence, nats" in shown
    values = json.loads(run("info", tmp_path / "two", "--json").stdout)
    assert values["evidence"]["matrices"] == {"int8": 10}
    assert (tmp_path / "one" / "model.onnx").read_bytes() == (tmp_path / "two" / "model.onnx").read_bytes()


def test_a_nanogpt_file_by_the_command_line(tmp_path: Path) -> None:
    from dialects import DIALECTS

    standin = DIALECTS["nanogpt"](tmp_path / "nano")
    checkpoint, tokenizer = standin.source.name, standin.source.tokenizer
    assert tokenizer is not None
    done = run("export", checkpoint, "-o", tmp_path / "out", "--tokenizer", tokenizer, "--flavour", "portable")
    assert done.exit_code == 0, done.stderr
    assert "Note: ckpt.pt was read with weights_only=True" in done.stderr
    found = json.loads(run("generate", tmp_path / "out", "It is", "--max-new-tokens", "9", "--json").stdout)
    prompt = ortgpt.load(tmp_path / "out").tokenizer.encode("It is")
    assert found["token_ids"] == standin.greedy(prompt, 9)
    alone = run("export", checkpoint, "-o", tmp_path / "again")
    assert (alone.exit_code, "--tokenizer" in alone.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["generate", "austen", "-1"], "generate [OPTIONS] BUNDLE -- [PROMPT]"),
        (["generate", "austen", "-1 and more"], "generate [OPTIONS] BUNDLE -- [PROMPT]"),
        (["generate", "austen", "--and more"], "generate [OPTIONS] BUNDLE -- [PROMPT]"),
        (["chat", "austen", "-1"], "chat [OPTIONS] BUNDLE -- [PROMPT]"),
        (["classify", "bundle", "a text", "-b"], "classify [OPTIONS] BUNDLE -- [TEXT]..."),
        (["task", "austen", "qa", "-1?"], "task [OPTIONS] BUNDLE FORM -- [TEXT]"),
        (["score", "austen", "-file"], "score [OPTIONS] BUNDLE -- [FILE]"),
        (["info", "-bundle"], "info [OPTIONS] -- BUNDLE"),
    ],
)
def test_an_argument_that_looks_like_a_flag_is_told_how_to_be_given(arguments: list[str], usage: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].endswith(f"An argument that begins with - goes last, after --: main {usage}")


def test_after_two_dashes_any_text_is_a_prompt() -> None:
    with ortgpt.load("austen") as generator:
        for text in ("-1", "--top-k", "-h"):
            result = run("generate", "austen", "--max-new-tokens", "3", "--", text)
            assert (result.exit_code, result.stdout) == (0, generator.generate(text, max_new_tokens=3).text + "\n")


def test_a_misspelt_flag_is_no_argument() -> None:
    for arguments in (["generate", "austen", "--topk", "3"], ["doctor", "-x"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "after --" not in result.stderr
    assert "--top-k" in run("generate", "austen", "--topk", "3").stderr
