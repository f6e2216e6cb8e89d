"""The command line in the world: streams that are closed or full, arguments that are no text, texts that are hostile.

Each runs as a process of its own, since it is the process's streams that matter.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import ortgpt
from ortgpt.cli.main import main
from support import reseal, write_checkpoint

fcntl = pytest.importorskip("fcntl", reason="a POSIX shell closes and fills the streams")

ESCAPE = "\x1b]0;owned\x07\x1b[31m"


def shell(command: str, *args: str | Path | bytes, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which $ORTGPT is the command line and $1, $2 ... are the arguments."""
    line = ["sh", "-c", command.replace("ORTGPT", f"{sys.executable} -m ortgpt"), "sh", *map(os.fsencode, args)]
    return subprocess.run(line, capture_output=True, check=False, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("ORTGPT generate $1 a --max-new-tokens 1 >&-", "standard output is closed"),
        ("ORTGPT generate $1 a --max-new-tokens 1 --json >&-", "standard output is closed"),
        ("ORTGPT info $1 >&-", "standard output is closed"),
        ("ORTGPT doctor --json >&-", "standard output is closed"),
        ("echo abc | ORTGPT score $1 >&-", "standard output is closed"),
        ("ORTGPT chat $1 a >&-", "standard output is closed"),
        ("ORTGPT generate $1 - <&-", "standard input is closed"),
        ("ORTGPT score $1 <&-", "standard input is closed"),
        ("ORTGPT chat $1 a <&-", "standard input is closed"),
        ("ORTGPT generate $1 a --max-new-tokens 1 > /dev/full", "standard output: No space left on device"),
        ("ORTGPT generate $1 a --max-new-tokens 1 --json > /dev/full", "standard output: No space left on device"),
        ("ORTGPT info $1 > /dev/full", "standard output: No space left on device"),
        ("ORTGPT doctor > /dev/full", "standard output: No space left on device"),
        ("printf abc | ORTGPT score $1 > /dev/full", "standard output: No space left on device"),
        ("echo '\"a\"' > $2; ORTGPT generate $1 --input $2 > /dev/full", "standard output: No space left on device"),
        ("echo '\"a\"' > $2; ORTGPT generate $1 --input $2 --output /dev/full", "/dev/full is not a regular file"),
    ],
)
def test_an_answer_that_goes_nowhere_is_an_error(command: str, reason: str, small_bundle: Path, tmp_path: Path) -> None:
    done = shell(command, small_bundle, tmp_path / "prompts")
    assert done.returncode in (1, 2)
    assert reason in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert b"ignored" not in done.stderr


def test_no_standard_error_is_no_error(small_bundle: Path) -> None:
    done = shell("ORTGPT generate $1 a --max-new-tokens 2 2>&-", small_bundle)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout) > 1
    assert shell("ORTGPT generate $1 --top-p 7 2>&-", small_bundle).returncode == 2


@pytest.mark.parametrize("line", ['ORTGPT generate $1 "$2"', 'ORTGPT chat $1 "$2" < /dev/null'])
def test_a_prompt_that_is_no_utf8_is_refused_as_on_standard_input(line: str, small_bundle: Path) -> None:
    done = shell(line, small_bundle, b"It \xff is")
    assert done.returncode == 2
    assert "PROMPT is not UTF-8 text from character 3 on" in done.stderr.decode()


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "command",
    [
        "ORTGPT score $1 $2 --json",
        "ORTGPT score $1 --json < $2",
        "cat $2 | ORTGPT score $1 - --json",
        "ORTGPT generate $1 - --echo --max-new-tokens 5 < $2",
        "cat $2 | ORTGPT generate $1 --echo --max-new-tokens 5",
        'ORTGPT generate $1 "$(cat $2)" --echo --max-new-tokens 5',
        "ORTGPT chat $1 --max-new-tokens 5 < $2",
        'ORTGPT chat $1 "$(cat $2)" --max-new-tokens 5 < /dev/null',
        "ORTGPT generate $1 --input $2 --input-format text --max-new-tokens 5 | sed 's/.timings.*//'",
    ],
)
def test_a_byte_order_mark_is_no_text(command: str, small_bundle: Path, tmp_path: Path) -> None:
    for name, data in (("with", MARK + b"It is a truth"), ("without", b"It is a truth")):
        (tmp_path / name).write_bytes(data)
    found = [shell(command, small_bundle, tmp_path / name) for name in ("with", "without")]
    assert [done.returncode for done in found] == [0, 0]
    assert found[0].stdout == found[1].stdout != b""


def test_a_byte_order_mark_elsewhere_is_text(small_bundle: Path, small: ortgpt.Generator) -> None:
    done = shell("printf 'a\\357\\273\\277b' | ORTGPT score $1 --json", small_bundle)
    assert json.loads(done.stdout)["nll"] == pytest.approx(small.score("a\ufeffb").nll)
    assert json.loads(done.stdout)["tokens"] == len(small.tokenizer.encode("a\ufeffb"))


def test_a_schema_with_a_byte_order_mark(small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_bytes(MARK + b'{"type": "boolean"}')
    done = shell("ORTGPT generate $1 a --grammar-json-schema $2", small_bundle, tmp_path / "schema.json")
    assert (done.returncode, done.stdout in (b"true\n", b"false\n")) == (0, True)


@pytest.mark.parametrize(
    "command",
    [
        "ORTGPT score $1 $2", "ORTGPT generate $1 < $2", "ORTGPT generate $1 - < $2", "ORTGPT chat $1 < $2",
        "ORTGPT generate $1 --input $2", "ORTGPT generate $1 a --grammar-json-schema $2",
    ],
)  # fmt: skip
def test_utf16_is_named(command: str, small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffIt is a truth\n".encode("utf-16-le"))
    done = shell(command, small_bundle, tmp_path / "text")
    assert (done.returncode, done.stdout) == (1, b"")
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "is UTF-16 text by its byte-order mark" in lines[0]


@pytest.mark.parametrize(
    ("command", "prompt"),
    [
        ("echo hello | ORTGPT generate $1 --max-new-tokens 5", "hello\n"),
        ("printf hello | ORTGPT generate $1 --max-new-tokens 5 --json", "hello"),
        ("printf hello > $2; ORTGPT generate $1 --max-new-tokens 5 < $2", "hello"),
        ("(sleep 2; printf hello) | ORTGPT generate $1 --max-new-tokens 5", "hello"),
        ("echo hello | ORTGPT generate $1 'a man' --max-new-tokens 5", "a man"),
        (": | ORTGPT generate $1 --max-new-tokens 5", ""),
        ("ORTGPT generate $1 --max-new-tokens 5 < /dev/null", ""),
        ("ORTGPT generate $1 --max-new-tokens 5 <&-", ""),
    ],
)
def test_a_pipe_or_a_file_is_the_prompt_that_the_command_line_lacks(
    command: str, prompt: str, small_bundle: Path, small: ortgpt.Generator, tmp_path: Path
) -> None:
    done = shell(command, small_bundle, tmp_path / "text", stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    want = small.generate(prompt, max_new_tokens=5).text
    assert (json.loads(done.stdout)["text"] if "--json" in command else done.stdout.decode()[:-1]) == want


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_standard_input_that_never_ends_is_not_waited_for(kind: str, small_bundle: Path) -> None:
    """A program may inherit the pipe or socket of another, which nobody writes to or closes."""
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "ortgpt", "generate", str(small_bundle), "--max-new-tokens", "5"]
    done = subprocess.run(
        command, stdin=read_end if kind == "pipe" else theirs.fileno(), capture_output=True, check=False, timeout=120
    )
    for end in (read_end, write_end):
        os.close(end)
    ours.close()
    theirs.close()
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"Error: nothing came through standard input for 10 seconds; give a PROMPT")
    assert done.stderr.count(b"\n") == 1


def test_a_socket_is_read(small_bundle: Path, small: ortgpt.Generator) -> None:
    """Node gives its child processes sockets for pipes."""
    ours, theirs = socket.socketpair()
    ours.sendall(b"hello")
    ours.shutdown(socket.SHUT_WR)
    command = [sys.executable, "-m", "ortgpt", "generate", str(small_bundle), "--max-new-tokens", "5"]
    done = subprocess.run(command, stdin=theirs.fileno(), capture_output=True, check=False, timeout=120)
    ours.close()
    theirs.close()
    assert done.stdout.decode() == small.generate("hello", max_new_tokens=5).text + "\n"


def test_paths_that_are_no_utf8_are_refused(small_bundle: Path, tmp_path: Path) -> None:
    named = os.fsencode(tmp_path) + b"/\xff"
    shutil.copytree(small_bundle, os.fsdecode(named))
    for command in ("generate", "info", "bench", "score"):
        done = shell(f"echo a | ORTGPT {command} $1", named)
        assert done.returncode == 1
        assert "is not UTF-8" in done.stderr.decode()
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    done = shell("ORTGPT export $1 -o $2", checkpoint, named + b"2")
    assert done.returncode == 1
    assert "is not UTF-8" in done.stderr.decode()


def test_what_a_terminal_would_obey_is_written_out(small_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(small_bundle, tmp_path / "bundle"))
    (bundle / "generation_config.json").write_text(json.dumps({f"odd{ESCAPE}": 1, "eos_token_id": 0}))
    reseal(bundle, lambda m: m["source"].update(id=f"it\nverified: all{ESCAPE}", licence=ESCAPE))
    done = shell("ORTGPT info $1; ORTGPT generate $1 a --max-new-tokens 1", bundle)
    assert rb"it\nverified: all\x1b]0;owned\x07" in done.stdout
    assert b"odd" in done.stderr
    assert b"\x1b" not in done.stdout.split(b"\n\n")[0] + done.stderr
    (bundle / f"{ESCAPE}.onnx").touch()
    done = shell("ORTGPT info $1", bundle)
    assert b"is not listed in the manifest" in done.stderr
    assert b"\x1b" not in done.stderr


def test_two_runs_do_not_write_one_file(small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('"a"\n"b"\n')
    with (tmp_path / "out").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = shell("ORTGPT generate $1 --input $2 --output $3", small_bundle, tmp_path / "prompts", tmp_path / "out")
    assert done.returncode == 2
    assert "out is being written by another run" in done.stderr.decode()
    assert (tmp_path / "out").read_bytes() == b""
    done = shell("ORTGPT generate $1 --input $2 --output $3", small_bundle, tmp_path / "prompts", tmp_path / "out")
    assert done.returncode == 0
    assert len((tmp_path / "out").read_bytes().splitlines()) == 2


def test_a_file_of_prompts_with_odd_lines(small_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(json.dumps({"prompt": "a", "logit_bias": {"9" * 5000: 1}}) + "\n")
    done = shell("ORTGPT generate $1 --input $2 --strict", small_bundle, tmp_path / "prompts")
    assert done.returncode == 2
    assert "prompts line 1: --logit-bias = " in done.stderr.decode()
    assert len(done.stderr) < 1000
    (tmp_path / "prompts").write_text(json.dumps({"prompt": "a", "cancel": 1}) + "\n")
    done = shell("ORTGPT generate $1 --input $2 --strict", small_bundle, tmp_path / "prompts")
    assert "line 1: cancel = 1 (accepted" in done.stderr.decode()
    (tmp_path / "prompts").write_text('"a"\n')
    (tmp_path / "out").write_text("[" * 100_000 + "\n")
    done = shell("ORTGPT generate $1 --input $2 --output $3", small_bundle, tmp_path / "prompts", tmp_path / "out")
    assert done.returncode == 2
    assert "out has a line that this command did not write" in done.stderr.decode()


def test_chat_goes_on_after_a_name_that_cannot_be_saved_to(small_bundle: Path) -> None:
    done = shell(
        "printf '/save a\\0b\\n/save /dev/full\\n/text\\n' | ORTGPT chat $1 Hello --max-new-tokens 1", small_bundle
    )
    assert done.returncode == 0
    said = done.stderr.decode()
    assert "/save 'a\\x00b' (accepted: the name of a file)" in said
    assert "/dev/full: No space left on device" in said
    assert done.stdout.count(b"Hello") == 1


@pytest.mark.parametrize("command", ["ORTGPT generate $1 a --max-new-tokens 60", "ORTGPT score $1 $1/vocab.json"])
def test_ctrl_c_ends_with_one_line(command: str, small_bundle: Path) -> None:
    """Where it comes while the package is being imported, Python's own words are all that can be said."""
    code = (
        "import os, signal, sys, ortgpt.cli.main, ortgpt.opening as m\n"
        "real = m.open_bundle\n"
        "m.open_bundle = lambda path: os.kill(os.getpid(), signal.SIGINT) or real(path)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "ortgpt.cli.main.main(sys.argv[1:])"
    )
    args = [each.replace("$1", str(small_bundle)) for each in command.split()[1:]]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


def test_a_mark_before_the_text_of_a_flag_is_left_out(small_bundle: Path, small: ortgpt.Generator) -> None:
    """A shell puts it there: --stop "$(cat FILE)"."""
    text = small.generate("a man", max_new_tokens=9).text
    stop = text[3:5]
    flags = ["--stop", "\ufeff" + stop, "--max-new-tokens", "9"]
    result = CliRunner().invoke(main, ["generate", str(small_bundle), "a man", *flags])
    assert result.stdout == small.generate("a man", max_new_tokens=9, stop=stop).text + "\n"
    schema = '\ufeff{"type": "boolean"}'
    result = CliRunner().invoke(main, ["generate", str(small_bundle), "a man", "--grammar-json-schema", schema])
    assert result.stdout in ("true\n", "false\n")
