"""The commands that write text: generate and chat. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ortgpt.bundle.files import naming
from ortgpt.cli.id_text import as_prompt, token_text, written
from ortgpt.cli.options import (
    chat_options,
    device_options,
    flag_mention,
    generation_options,
    input_options,
    prefill_option,
    read_options,
)
from ortgpt.cli.prompt_files import run_file
from ortgpt.cli.prompt_lines import PromptFile
from ortgpt.cli.streams import (
    completion_values,
    json_text,
    piped_text,
    printable,
    read_argument,
    read_lines,
    read_text,
    write_text,
)
from ortgpt.conversation import Conversation
from ortgpt.errors import OptionError, OrtGptError
from ortgpt.generator import Generator
from ortgpt.loading import load
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.results import Completion, Piece, TokenLogprob

_CHAT_COMMANDS = {
    "/rewind [N]": "take back the last N turns",
    "/again": "take the last turn back and try once more (with --seed or --temperature: another text)",
    "/newline": "end the text's last line",
    "/text": "show the whole text",
    "/save FILE": "write it to FILE",
    "/quit": "leave (or Ctrl-D)",
}
_CHAT_HELP = """\
A line is added to the text as it is (begin a new word with a space), and the model continues; an empty line lets it
continue. Ctrl-C stops it, and its text stays. A line that begins with / is a command:

\b
""" + "\n".join(f"{command:13}{meaning}" for command, meaning in _CHAT_COMMANDS.items())


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@generation_options
@input_options(
    "prompt",
    'Take prompts from FILE; each line is a JSON text, list of ids or object: {"prompt": ..., options}, or a '
    'line of an OpenAI batch file: {"custom_id": ..., "body": ...}. A line that fails becomes a record with "error".',
)
@click.option(
    "--output",
    "output_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --input: append a JSON object for each continuation to FILE, 32 prompts at a time; the same command "
    "continues after an interruption. [default: standard output]",
)
@click.option(
    "--strict", is_flag=True, help="With --input: check every line before any work, and end at the first bad one."
)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object for each continuation instead of the text.")
@prefill_option
@device_options
def generate(
    bundle: Path, prompt: str | None, echo: bool, as_json: bool, prefill: str, device: str, threads: int | None,
    input_file: Path | None, input_format: str | None, output_file: Path | None, strict: bool, **values: Any,
) -> None:  # fmt: skip
    """Continue PROMPT with the model in BUNDLE, a folder or the built-in model "austen".

    PROMPT - reads standard input as it is, a newline at its end included. Without PROMPT, a pipe or a file on standard
    input is the prompt; otherwise a new text begins. A pipe through which nothing comes for 10 seconds is an
    error. With PROMPT, or with --input, a pipe is not read.

    Each step takes the most likely token, unless one of --temperature, --top-k, --top-p, --min-p, --typical-p and
    --seed turns sampling on. Several continuations of one prompt are separated by lines of ---. --logprobs go to
    standard error, a line for each token: the token, its log-probability, the most likely tokens and theirs.

    If BUNDLE has no tokenizer, PROMPT is token ids separated by white space, and so is the answer.
    """
    options = read_options(values)
    if echo and "logprobs" in options:
        options["echo"] = True
    of_file = {"--output": output_file is not None, "--input-format": input_format is not None, "--strict": strict}
    of_prompt = {"PROMPT": prompt is not None, "--json": as_json, "--echo": echo and "echo" not in options}
    for name in [name for name, is_given in (of_file if input_file is None else of_prompt).items() if is_given]:
        if input_file is None:
            raise OptionError(f"{name} needs --input, a file of prompts")
        raise OptionError(
            f"{name} cannot be combined with --input, which continues the prompts of a file and writes JSON"
        )
    lines = None if input_file is None else PromptFile(input_file, input_format)
    text = _prompt_text(prompt) if lines is None else ""
    with _loaded(bundle, device, threads, prefill, options) as generator:
        if lines is not None:
            failed = run_file(generator, lines, output_file, options, strict=strict)
            sys.exit(1 if failed else 0)
        elif as_json or "logprobs" in options or any(name in options for name in ("num_beams", "num_return_sequences")):
            _write_completions(generator, text, echo, as_json, options)
        else:
            _write_stream(generator, text, echo, options)


@click.command(help=f"Write a text together with the model in BUNDLE, turn by turn, from PROMPT on.\n\n{_CHAT_HELP}")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False, default="")
@chat_options
@prefill_option
@device_options
def chat(bundle: Path, prompt: str, prefill: str, device: str, threads: int | None, **values: Any) -> None:
    options = read_options(values)
    GenerationOptions.make(None, options)
    prompt = read_argument("PROMPT", prompt)
    if sys.stdin is None:
        raise click.ClickException("standard input is closed; chat reads its turns from it")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() line editing and a history
    with _loaded(bundle, device, threads, prefill, options) as generator:
        if not generator.has_text:
            raise OptionError("chat needs a bundle with a tokenizer; `ortgpt generate` continues token ids")
        click.echo(_CHAT_HELP.replace("\b\n", ""), err=True)
        _Chat(generator.conversation(prompt), options).run(begun=prompt != "")


def _prompt_text(prompt: str | None) -> str:
    """Return the text to continue: PROMPT, or what standard input holds. Raises OptionError, ClickException."""
    if prompt is None:
        return piped_text()
    return read_text("-") if prompt == "-" else read_argument("PROMPT", prompt)


def _typed_lines() -> Iterator[str]:
    """Yield the lines that are typed at a terminal, until Ctrl-D."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo("\n/quit or Ctrl-D leaves", err=True)
        except UnicodeDecodeError as error:
            click.echo(f"the line is not UTF-8: {error}", err=True)


class _Chat:
    """The conversation, and how many turns it has had."""

    def __init__(self, conversation: Conversation, options: dict[str, Any]) -> None:
        self._conversation = conversation
        self._options = options
        self._turns = 0

    def run(self, *, begun: bool) -> None:
        if begun:
            self._obey("")
        for line in _typed_lines() if sys.stdin.isatty() else read_lines():
            if line == "/quit":
                return
            self._obey(line)
        click.echo(err=True)

    def _obey(self, line: str) -> None:
        """Carry out a line; an error is one line, and the text stays as before."""
        try:
            if line.startswith("/"):
                self._command(*line.split(" ", 1))
            else:
                self._turn(line)
        except OSError as error:
            click.echo(printable(f"{error.filename}: {error.strerror}"), err=True)
        except OrtGptError as error:
            message = error.worded(flag_mention) if isinstance(error, OptionError) else str(error)
            click.echo(printable(message, kept="\n"), err=True)

    def _command(self, name: str, rest: str = "") -> None:
        conversation = self._conversation
        if name == "/rewind":
            if rest and not rest.isdecimal():
                raise OptionError(f"/rewind {rest} (accepted: a number of turns)")
            conversation.rewind(int(rest or 1))
        elif name == "/again":
            self._turn(conversation.rewind())
        elif name == "/newline":
            self._turn("\n")
        elif name == "/text":
            write_text(conversation.text + "\n")
        elif name == "/save" and rest:
            if "\0" in rest:
                raise OptionError(f"/save {rest!r} (accepted: the name of a file)")
            with naming(rest):
                Path(rest).write_text(conversation.text, encoding="utf-8", newline="")
        else:
            accepted = ", ".join(_CHAT_COMMANDS)
            click.echo(f"{name} is not a command, or lacks its argument (accepted: {accepted})", err=True)

    def _turn(self, text: str | list[int]) -> None:
        """Let the model continue after `text`; Ctrl-C ends it, and its text stays. A seed counts up turn by turn."""
        options = self._options
        if "seed" in options:
            options = options | {"seed": options["seed"] + self._turns}
        pieces = self._conversation.stream(text, **options)
        self._turns += 1
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pieces):
            for piece in pieces:
                write_text(piece.text)
        write_text("\n")


@contextlib.contextmanager
def _loaded(
    bundle: Path, device: str, threads: int | None, prefill: str, options: dict[str, Any]
) -> Iterator[Generator]:
    """Load a bundle, and the draft model that the options name."""
    assistant = options.pop("assistant", None)
    with contextlib.ExitStack() as stack:
        generator = stack.enter_context(load(bundle, device=device, threads=threads, prefill=prefill))
        if assistant is not None:
            options["assistant_model"] = stack.enter_context(load(assistant, device=device, threads=threads))
        yield generator


def _write_stream(generator: Generator, text: str, echo: bool, options: dict[str, Any]) -> None:
    pieces = generator.stream(as_prompt(generator, text), **options)
    if echo:
        write_text(text)
    last, follows = None, bool(echo and text)
    try:
        for last in pieces:
            write_text(written(generator, last, follows=follows))
            follows = True
    finally:
        write_text("\n")
    if last is not None:
        _warn_if_cut(last, options)


def _write_completions(generator: Generator, text: str, echo: bool, as_json: bool, options: dict[str, Any]) -> None:
    found = generator.generate_batch([as_prompt(generator, text)], **options)
    begin = text if echo else ""
    for place, completion in enumerate(found):
        _warn_if_cut(completion, options)
        if as_json:
            whole = begin + completion.text if generator.has_text else ""
            write_text(json_text(completion_values(completion) | {"text": whole}) + "\n")
        else:
            whole = begin + written(generator, completion, follows=bool(begin))
            write_text(("---\n" if place else "") + whole + "\n")
            _show_logprobs(generator, [*(completion.prompt_logprobs or ()), *(completion.logprobs or ())])


def _warn_if_cut(done: Completion | Piece, options: dict[str, Any]) -> None:
    """Warn if a text does not follow its grammar to the end."""
    if "grammar" in options and (done.finish_reason != "stop" or isinstance(done.stop_reason, str)):
        why = f"the stop text {done.stop_reason!r}" if isinstance(done.stop_reason, str) else done.finish_reason
        click.echo(f"the text does not follow its grammar to the end: {why} ended it", err=True)


def _show_logprobs(generator: Generator, logprobs: list[TokenLogprob]) -> None:
    for each in logprobs:
        likely = "  ".join(f"{token_text(generator, token_id)} {logprob:.3f}" for token_id, logprob in each.top)
        logprob = "" if each.logprob is None else f"{each.logprob:.3f}"
        click.echo(f"{token_text(generator, each.token_id):<16} {logprob:>9}   {likely}".rstrip(), err=True)
