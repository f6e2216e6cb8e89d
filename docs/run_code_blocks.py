"""Run the examples of a page and compare what they write with the output that the page shows.

`python docs/run_code_blocks.py PAGE...` runs the blocks marked `python` in order, in one namespace, and the commands of
blocks marked `console`, all in a temporary folder. A block of `text` straight after a block of `python` is its output.
With `--write` the shown outputs are replaced by what was written. Blocks marked `py` or `sh` are not run.

The output of a quantised model can differ between kinds of CPUs; `--run-only` compares nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```(?P<kind>[a-z]+)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(page: str, name: str) -> str:
    """Run the blocks of a page in the current folder; return the page with the outputs that they wrote.

    Raises what a block raises, and RuntimeError for a command that fails.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    end, output = 0, None
    for fence in _FENCE.finditer(page):
        between, body = page[end : fence.start()], fence["body"]
        follows = output is not None and fence["kind"] == "text" and not between.strip()
        if output and not follows:
            parts.append(f"\n\n```text\n{output}```")
        if follows:
            body = output or ""
        output = None
        if fence["kind"] == "python":
            line = page.count("\n", 0, fence.start("body"))
            output = run_python("\n" * line + body, name, namespace)
        elif fence["kind"] == "console":
            body = "".join(f"$ {command}\n{run_command(command)}" for command in commands(body))
        if not (follows and not body):
            head = page[fence.start() : fence.start("body")]
            parts.append(f"{between}{head}{body}```")
        end = fence.end()
    if output:
        parts.append(f"\n\n```text\n{output}```")
    return "".join([*parts, page[end:]])


def run_python(source: str, name: str, namespace: dict[str, Any]) -> str:
    """Run a block; return what it wrote to standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, name, "exec"), namespace)
    return whole_lines(out.getvalue())


def commands(body: str) -> list[str]:
    """Return the commands of a console block, without its outputs."""
    return [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]


def run_command(command: str) -> str:
    """Run a line of a shell, in which `ortgpt` is this Python's; return what it wrote to standard output."""
    ours = f'ortgpt() {{ {shlex.quote(sys.executable)} -m ortgpt "$@"; }}; '
    done = subprocess.run(["bash", "-c", ours + command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}: {done.stderr.strip()}")
    return whole_lines(done.stdout)


def whole_lines(text: str) -> str:
    """Return a text without blanks at the ends of its lines, and with an end to its last line."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="replace the outputs that a page shows")
    what.add_argument("--run-only", action="store_true", help="compare nothing")
    args = parser.parse_args()
    stale = []
    for path in [path.resolve() for path in args.pages]:
        shown = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            written = run_page(shown, str(path))
        if args.write:
            path.write_text(written, encoding="utf-8")
        elif written != shown and not args.run_only:
            pairs = zip(shown.splitlines(), written.splitlines(), strict=False)
            place = next((i for i, (one, other) in enumerate(pairs, 1) if one != other), len(shown.splitlines()))
            actual = [*written.splitlines(), ""][place - 1]
            stale.append(f"{path.name}:{place}: the output differs; it is now {actual!r}")
    for line in stale:
        sys.stderr.write(line + os.linesep)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
