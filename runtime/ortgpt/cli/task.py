"""The command task: summaries, translations, answers, words and labels by prompt. The answer goes to stdout."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from ortgpt.bundle.checked_json import parse_json
from ortgpt.cli.options import (
    device_options,
    input_options,
    prefill_option,
    read_options,
    some_options,
    verify_option,
)
from ortgpt.cli.prompt_lines import PromptFile
from ortgpt.cli.streams import (
    completion_values,
    json_text,
    piped_text,
    read_argument,
    read_text,
    write_line,
    write_text,
)
from ortgpt.errors import ClosedError, EngineError, OptionError, OrtGptError, PromptError, shown
from ortgpt.generator import Generator
from ortgpt.loading import load
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.tasks import TaskForm, TaskResult, form_names, form_text, read_form, run_task_batch
from ortgpt.tasks.form import RESERVED
from ortgpt.tasks.options import COMMAND_OPTIONS

_CHUNK = 32  # inputs that are computed and written at once
_ANSWER, _EXPECTED = "answer", "expected"  # a row's own answer, and its name in the record

_Result = TaskResult | OrtGptError


@dataclass(frozen=True)
class _Row:
    """The fields of one input; where a line holds none, `error` says why."""

    fields: Mapping[str, Any]
    line: int | None = None
    """Its line in the input; None for an argument."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What else the line says, which comes back in its record."""
    error: OrtGptError | None = None


def _list_forms(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        width = max(map(len, form_names())) + 2
        for name in form_names():
            write_line(f"{name:<{width}}{read_form(name).description}")
        context.exit()


def _show_form(context: click.Context, _: click.Parameter, name: str | None) -> None:
    if name is not None:
        try:
            text = form_text(name)
        except OrtGptError as error:
            raise click.UsageError(str(error)) from None
        write_text(text)
        context.exit()


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("form")
@click.argument("text", required=False)
@some_options(COMMAND_OPTIONS)
@click.option(
    "--set",
    "settings",
    metavar="FIELD=TEXT",
    multiple=True,
    help="Give a field of the form; TEXT is the one field that is left. Repeatable.",
)
@input_options(
    "text",
    "Take the inputs from FILE; each line is a JSON object with the fields, whose other keys come back with "
    "--json, or a JSON text, which is the one field that --set leaves. - is standard input.",
)
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object for each answer.")
@verify_option
@prefill_option
@device_options
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_forms,
    help="Write the names of the forms that come with ortgpt, and what each is for; needs no BUNDLE.",
)  # fmt: skip
@click.option(
    "--show", metavar="FORM", is_eager=True, expose_value=False, callback=_show_form,
    help="Write the text of a form, to change a copy of it; needs no BUNDLE.",
)  # fmt: skip
def task(
    bundle: Path, form: str, text: str | None, settings: tuple[str, ...], input_file: Path | None,
    input_format: str | None, as_json: bool, verify: str, prefill: str, device: str, threads: int | None, **values: Any,
) -> None:  # fmt: skip
    """Let the language model in BUNDLE do a task for TEXT, by the prompt that FORM describes.

    FORM is summarize, translate, qa, cloze or classify, or a TOML file of your own, as ./mine.toml. TEXT - reads
    standard input; without TEXT, a pipe or a file on standard input is the text, without the line end at its end.
    Options of the generation win over those of the form. An input that fails gets an "error" in its place, and the exit
    code is 1.
    """
    options = read_options(values)
    GenerationOptions.make(None, options)
    read = read_form(form)
    fixed = _read_settings(read, settings)
    if input_file is not None and text is not None:
        raise OptionError("TEXT cannot be combined with --input, which has the texts in a file")
    if input_format is not None and input_file is None:
        raise OptionError("--input-format needs --input, a file of texts")
    if input_file is None:
        rows = [_Row(_with_text(read, fixed, text))]
    else:
        source = PromptFile(input_file, input_format)
        rows = [_read_line(read, fixed, source.format, line, number) for number, line in source.lines]
        if not rows:
            raise OptionError(f"--input {input_file} has no inputs (accepted: one in each line)")
    failed = 0
    write = partial(_write_json, read) if as_json else _write_plain
    with load(bundle, device=device, threads=threads, verify=verify, prefill=prefill) as generator:
        for begin in range(0, len(rows), _CHUNK):
            chunk = rows[begin : begin + _CHUNK]
            for row, result in zip(chunk, _answered(generator, read, chunk, options), strict=True):
                failed += isinstance(result, OrtGptError)
                write(row, result)
    if failed:
        click.echo(f"{failed:,} of {len(rows):,} inputs failed, as their answers say", err=True)
        sys.exit(1)


def _read_settings(form: TaskForm, settings: Sequence[str]) -> dict[str, str]:
    """Return the fields that --set gives. Raises OptionError."""
    fixed: dict[str, str] = {}
    accepted = ", ".join(form.fields)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in form.fields:
            raise OptionError(
                f"--set {shown(setting)} (accepted: FIELD=TEXT, where {form.name} has the fields {accepted})"
            )
        if name in fixed:
            raise OptionError(f"--set {name} is given twice: give one text for each field")
        fixed[name] = read_argument(f"--set {name}", value)
    return fixed


def _with_text(form: TaskForm, fixed: Mapping[str, str], text: str | None) -> dict[str, str]:
    """Return all fields: those of --set, and TEXT or standard input for the one that is left. Raises OptionError."""
    left = [name for name in form.fields if name not in fixed]
    if not left:
        if text is not None:
            raise OptionError("TEXT would have no effect: --set gives all fields of the form")
        return dict(fixed)
    if len(left) > 1:
        raise OptionError(
            f"{form.name} has the fields {', '.join(form.fields)}; give all but one of them by --set FIELD=TEXT, or "
            "all of them by --input FILE"
        )
    if text is None or text == "-":
        found = piped_text() if text is None else read_text("-")
        if text is None and not found:
            raise OptionError(f"no text (accepted: TEXT, --set {left[0]}=TEXT, --input FILE, or standard input)")
        return {**fixed, left[0]: found.removesuffix("\n").removesuffix("\r")}
    return {**fixed, left[0]: read_argument("TEXT", text)}


def _read_line(form: TaskForm, fixed: Mapping[str, str], format: str, line: str, number: int) -> _Row:
    """Return the input in a line; its own fields win over those of --set."""
    left = [name for name in form.fields if name not in fixed]
    value: Any = line
    if format != "text":
        try:
            value = parse_json(line, half_characters=True)
        except ValueError as error:
            return _Row({}, number, error=PromptError(f"not JSON: {error}"))
    if isinstance(value, dict):
        fields = {name: value[name] for name in form.fields if name in value}
        own = {_EXPECTED if name == _ANSWER else name: each for name, each in value.items() if name not in fields}
        taken = sorted(RESERVED & own.keys())
        if _ANSWER in value and _EXPECTED in value:
            taken.append(_EXPECTED)
        kept = {name: each for name, each in own.items() if name not in taken}
        wrong = f'"{taken[0]}" is a name that the record itself has; rename it' if taken else ""
        return _Row({**fixed, **fields}, number, kept, PromptError(wrong) if wrong else None)
    if not isinstance(value, str) or len(left) != 1:
        accepted = f"an object with {', '.join(left or form.fields)}" + (", or a text" if len(left) == 1 else "")
        return _Row(dict(fixed), number, error=PromptError(f"{shown(value)} (accepted: {accepted})"))
    return _Row({**fixed, left[0]: value}, number)


def _answered(generator: Generator, form: TaskForm, chunk: Sequence[_Row], options: Mapping[str, Any]) -> list[_Result]:
    """Return the answer to each input, or why there is none; where one is at fault, each is computed alone."""
    good = [row for row in chunk if row.error is None]
    results: Iterator[_Result]
    try:
        results = iter(run_task_batch(generator, form, [row.fields for row in good], **options))
    except OrtGptError as error:
        if isinstance(error, (ClosedError, EngineError, OptionError)) or chunk[0].line is None:
            raise
        if len(chunk) == 1:
            return [error]
        return [result for row in chunk for result in _answered(generator, form, [row], options)]
    return [next(results) if row.error is None else row.error for row in chunk]


def _write_json(form: TaskForm, row: _Row, result: _Result) -> None:
    record: dict[str, Any] = {} if row.line is None else {"line": row.line}
    record |= {**row.own, **{name: row.fields[name] for name in form.fields if name in row.fields}}
    if isinstance(result, OrtGptError):
        record["error"] = {"type": type(result).__name__, "message": str(result)}
    else:
        values = dataclasses.asdict(result)
        if result.completion is not None:
            values["completion"] = completion_values(result.completion)
        record |= {name: value for name, value in values.items() if value not in (None, {}, [])}
    write_line(json_text(record))


def _write_plain(row: _Row, result: _Result) -> None:
    if isinstance(result, OrtGptError):
        write_line(f"error  line {row.line}: {result}")
        return
    if result.is_likeliest is False:
        where = "" if row.line is None else f"line {row.line}: "
        click.echo(f"{where}the search of the word ended early: another one may be likelier", err=True)
    if result.probabilities:
        write_line(f"{result.answer}  {result.probabilities[result.answer]:.4f}")
    elif row.line is None:
        write_text(result.answer + "\n")
    else:
        write_line(result.answer)
