"""The command eval: how well a model does on a file. The answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ortgpt.cli.options import device_options, json_option, prefill_option
from ortgpt.cli.streams import json_text, read_argument, read_text, write_line
from ortgpt.loading import load
from ortgpt.results import Evaluation
from ortgpt.tools.evaluate import evaluate_rows
from ortgpt.tools.evaluation_rows import KINDS, read_rows


@click.command("eval")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("data_file", metavar="FILE")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help='What the rows are; last-word is the only kind that has to be named. [default: by the first row: "choices", '
    '"target" or "text"]',
)
@click.option(
    "--delimiter",
    metavar="TEXT",
    help='What stands between a context and a choice or target; "" if the file has it. [default: a space]',
)
@click.option("--limit", type=int, metavar="N", help="Take the first N rows only.")
@json_option
@prefill_option
@device_options
def evaluate(
    bundle: Path, data_file: str, kind: str | None, delimiter: str | None, limit: int | None, as_json: bool,
    prefill: str, device: str, threads: int | None,
) -> None:  # fmt: skip
    """Measure how well the model in BUNDLE answers the rows of FILE: accuracy, perplexity.

    FILE has a JSON object in each line, all of one kind; - is standard input. Multiple choice: "context", "choices",
    and "answer", an index or the text of a choice. Completion: "context" and "target". Perplexity: "text". Last word:
    "text", whose last word is the target. The figures are those of lm-evaluation-harness. If a row is at fault, nothing
    is computed; each such line is named, and the exit code is 1.
    """
    source = "standard input" if data_file == "-" else data_file
    if delimiter is not None:
        delimiter = read_argument("--delimiter", delimiter)
    rows = read_rows(read_text(data_file), source, kind=kind, delimiter=delimiter, limit=limit)
    with load(bundle, device=device, threads=threads, prefill=prefill) as generator:
        hidden = not sys.stderr.isatty()
        with click.progressbar(length=1, label="eval", file=sys.stderr, show_pos=True, hidden=hidden) as bar:

            def on_progress(done: int, total: int) -> None:
                bar.length = total
                bar.update(done - bar.pos)

            result = evaluate_rows(generator, rows, source, on_progress)
    if as_json:
        write_line(json_text(_values(result)))
    else:
        _write_plain(result)


def _counts(result: Evaluation) -> dict[str, int]:
    counts = {"rows": result.rows, "tokens": result.tokens, "words": result.words, "bytes": result.text_bytes}
    return {name: count for name, count in counts.items() if count is not None} | {"cut_rows": result.cut_rows}


def _values(result: Evaluation) -> dict[str, Any]:
    """Return one level of values, with the harness's names of standard errors."""
    values: dict[str, Any] = {"kind": result.kind, **_counts(result)}
    for name, metric in result.metrics.items():
        values |= {name: metric.value, f"{name}_stderr": metric.stderr, f"{name}_baseline": metric.baseline}
    return values


def _write_plain(result: Evaluation) -> None:
    for name, metric in result.metrics.items():
        error = "" if metric.stderr is None else f" ± {metric.stderr:,.4f}"
        write_line(f"{name:<16} {metric.value:,.4f}{error}  (baseline {metric.baseline:,.4f})")
    for name, count in _counts(result).items():
        if count or name != "cut_rows":
            write_line(f"{name:<16} {count:,}")
