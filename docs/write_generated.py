"""Write the pages of this folder that come from the code: the command line, the options, the keys and fields.

`python docs/write_generated.py` writes them; with `--check` it only says which of them differ, and exits with 1.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import ortgpt
from ortgpt.bundle import manifest
from ortgpt.cli.main import main as cli
from ortgpt_exporter.quantization.request import Quantization

DOCS = Path(__file__).parent
COLUMNS = 100  # of the help texts
_BEGIN, _END = "<!-- generated: begin -->", "<!-- generated: end -->"
_NOTE = "<!-- Written by docs/write_generated.py: change the code, then run it again. -->\n\n"


def write_pages(folder: Path, *, check: bool) -> list[str]:
    """Write the pages that differ from the code, or only find them to `check`; return their names."""
    pages = {"cli.md": cli_page(), "options.md": options_page()}
    blocks = {"bundle-format.md": manifest_tables(manifest), "api/ortgpt_exporter.md": quantization_table()}
    for name, block in blocks.items():
        pages[name] = with_block((folder / name).read_text(encoding="utf-8"), block)
    stale = []
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    return stale


def with_block(page: str, block: str) -> str:
    """Return a page with `block` between its two marks. Raises ValueError for a page that does not have them once."""
    before, found, rest = page.partition(_BEGIN)
    _, found_end, after = rest.partition(_END)
    if not found or not found_end or _BEGIN in after:
        raise ValueError(f"the page does not have {_BEGIN} and {_END} once, in this order")
    return f"{before}{_BEGIN}\n\n{block.strip()}\n\n{_END}{after}"


def cli_page() -> str:
    """Return the page of the command line: each command's help, as `ortgpt COMMAND --help` writes it."""
    width: dict[str, Any] = {"terminal_width": COLUMNS, "max_content_width": COLUMNS}
    context = click.Context(cli, info_name="ortgpt", **{**cli.context_settings, **width})
    parts = [
        "# Command line\n\n",
        _NOTE,
        "The answer goes to standard output, everything else to standard error. `--json` writes strict JSON, for "
        "programs; in it, a number that is not finite is null.\n\n"
        "| exit code | meaning |\n|---|---|\n"
        "| 0 | done |\n"
        "| 1 | the job failed, or some lines of `--input` did; one line says what was wrong, and what is accepted |\n"
        "| 2 | wrong usage |\n"
        "| 130 | interrupted |\n\n"
        "`export`, `quantize`, `train` and `finetune` need the extra `export`; without it they say how to install "
        "it.\n\n",
        help_block(cli, context),
    ]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None  # it was listed
        of_command = click.Context(command, info_name=name, parent=context, **{**command.context_settings, **width})
        parts += [f"\n## ortgpt {name}\n\n", help_block(command, of_command)]
    return "".join(parts)


def help_block(command: click.Command, context: click.Context) -> str:
    """Return the help of a command as a block of text."""
    return f"```{{ .text .cli-help }}\n{command.get_help(context).strip()}\n```\n"


def options_page() -> str:
    """Return the page of the generation options, two tables made from the fields of GenerationOptions."""
    options = {item.name: item.metadata["option"] for item in dataclasses.fields(ortgpt.GenerationOptions)}
    meanings = [
        (f"`{name}`", option.help, option.accepted, option.default_text or "not set")
        for name, option in options.items()
    ]
    others = [
        (
            f"`{name}`",
            names((option.flag or "").split(", ")) or "Python only",
            ("yes" + (f", as `{option.bundle_key}`" if option.bundle_key else "")) if option.from_bundle else "",
            names(option.elsewhere),
        )
        for name, option in options.items()
    ]
    return (
        f"# Generation options\n\n{_NOTE}"
        "Every call that generates text takes these options, as keywords or in an\n"
        "[`ortgpt.GenerationOptions`](api/ortgpt.md#ortgpt.GenerationOptions). Their names and meaning are those of\n"
        "`transformers`; [Differences from transformers](differences.md) says what differs. If an option is not in\n"
        "the call, its default holds.\n\n"
        + table(("option", "meaning", "accepted", "default"), meanings)
        + "\n## Where they come from, and other names\n\n"
        'Where the column "bundle" says yes, a value in the bundle\'s `generation_config.json` comes before the\n'
        'default. "Elsewhere" has names that other programs use; a call with one of them gets an error that says\n'
        "which name to use here.\n\n" + table(("option", "command line", "bundle", "elsewhere"), others)
    )


def names(words: Iterable[str]) -> str:
    """Return words as names in code, with commas between them."""
    return ", ".join(f"`{word}`" for word in words if word)


def manifest_tables(module: ModuleType) -> str:
    """Return a table of keys for the Manifest and for every record inside it; the texts are those under the fields."""
    tree = ast.parse(inspect.getsource(module))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = []
    for place, node in records(classes, "", classes["Manifest"], set()):
        parts.append(f"### {f'`{place}`' if place else 'The top level'}\n\n{ast.get_docstring(node)}\n\n")
        rows = [(f"`{name}`", json_type(annotation), text) for name, annotation, text in fields_of(node)]
        if not place:
            rows.append(("`sha256`", "string", "The sha256 of this file's canonical JSON without this key."))
        parts.append(table(("key", "type", "meaning"), rows) + "\n")
    return "".join(parts)


def quantization_table() -> str:
    """Return a table of the fields of Quantization."""
    rows = [(f"`{each.name}`", f"`{each.type}`", each.metadata["help"]) for each in dataclasses.fields(Quantization)]
    return table(("field", "type", "meaning"), rows)


def records(
    classes: dict[str, ast.ClassDef], place: str, node: ast.ClassDef, seen: set[str]
) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a record and those inside it, in the order of the keys, each with its place, like `graphs[].cache`."""
    if node.name in seen:
        return
    seen.add(node.name)
    yield place, node
    for name, annotation, _ in fields_of(node):
        for part in ast.walk(annotation):
            if isinstance(part, ast.Name) and part.id in classes:
                many = {"tuple": "[]", "Mapping": ".*"}.get(ast.unparse(annotation).partition("[")[0], "")
                yield from records(classes, f"{place}.{name}{many}".lstrip("."), classes[part.id], seen)


def fields_of(node: ast.ClassDef) -> list[tuple[str, ast.expr, str]]:
    """Return name, annotation and text of each field. Raises ValueError for a field without a text under it."""
    found = []
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        text = following.value if isinstance(following, ast.Expr) else None
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            raise ValueError(f"{node.name}.{item.target.id} has no text under it")
        found.append((item.target.id, item.annotation, " ".join(text.value.split())))
    return found


def json_type(annotation: ast.expr) -> str:
    """Return what a field is in JSON."""
    text = ast.unparse(annotation)
    optional = text.endswith(" | None")
    text = text.removesuffix(" | None")
    words = {"str": "string", "int": "integer", "float": "number", "bool": "true or false"}
    kind = words.get(text)
    if kind is None and text.startswith("tuple["):
        inner = text.removeprefix("tuple[").removesuffix(", ...]")
        kind = f"list of {words[inner]}s" if inner in words else "list of objects"
    return (kind or "object") + (" or null" if optional else "")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; a bar in a cell is escaped."""
    cells = [head, ("---",) * len(head), *rows]
    lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in cells)
    return "".join(f"| {line} |\n" for line in lines)


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    stale = write_pages(DOCS, check=check)
    if check and stale:
        sys.stderr.write(f"{', '.join(stale)}: not what the code says; run python docs/write_generated.py\n")
        return 1
    for name in stale:
        sys.stdout.write(f"wrote docs/{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
