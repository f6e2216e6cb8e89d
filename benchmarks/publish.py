"""Put the tables of a comparison on the page docs/benchmarks.md, and draw docs/assets/speed.svg from the page.

publish.py WORK_FOLDER takes the results from the folder that `make bench-peers` or compare.py wrote; publish.py
--plot-only only draws. The plot shows three columns of the table of 8 bits, one bar for each program; of several
formats of a program, the last.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks.md", DOCS / "assets" / "speed.svg"
TABLES = re.compile(r"(<!-- benchmark tables: begin .*?-->\n\n)(.*?)(\n\n<!-- benchmark tables: end -->)", re.DOTALL)
CLASS = "8 bits"
PANELS = {
    "prefill 128, ms": "prompt of 128 tokens, ms",
    "decode at 128, ms": "each next token, ms",
    "peak memory, MB": "peak memory, MB",
}
OUR_NAME = "ortgpt"
OUR_COLOUR, COLOUR = "#e8710a", "#9aa0a6"
GREY = "#7a828c"  # text that is readable on white and on black
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ortgpt",  # the same file for the same numbers
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def replace_tables(page: str, work: Path) -> str:
    """Return the page with the tables of compare.md. Exits if a program is missing or failed."""
    results = json.loads((work / "compare.json").read_text(encoding="utf-8"))
    failures = {f"{entry['program']} {entry['format']}": entry["failure"] for entry in results["entries"]}
    faults = [f"{name}: {reason}" for name, reason in (results["missing"] | failures).items() if reason]
    if faults:
        raise SystemExit("\n".join(["not published, since a program is missing or failed:", *faults]))
    # The first line describes the machine.
    tables = (work / "compare.md").read_text(encoding="utf-8").partition("\n")[2].strip()
    return TABLES.sub(lambda match: match[1] + tables + match[3], page)


def read_table(page: str, class_name: str) -> dict[str, dict[str, str]]:
    """Return the cells of one table, by row and by column, without the rows that compare and those that failed."""
    match = TABLES.search(page)
    if match is None:
        raise SystemExit(f"{PAGE} has no marked tables")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[2].splitlines()]
    first = next((number for number, line in enumerate(lines) if line[0] == class_name), None)
    if first is None:
        raise SystemExit(f"{PAGE} has no table of {class_name}")
    rows = lines[first + 2 : lines.index([""], first) if [""] in lines[first:] else None]
    return {
        row[0]: dict(zip(lines[first], row, strict=True))
        for row in rows
        if not row[0].startswith("best other") and not row[1].startswith("failed")
    }


def draw(table: dict[str, dict[str, str]], path: Path) -> None:
    """Draw a panel for each of PANELS, one bar for each program; transparent, for light and dark pages."""
    names = list({name.split()[0]: name for name in table}.values())
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            1, len(PANELS), figsize=(9.2, 0.34 * len(names) + 0.7), sharey=True, layout="constrained"
        )
        for axis, (column, title) in zip(axes, PANELS.items(), strict=True):
            bars = axis.barh(names, [float(table[name][column]) for name in names], color=COLOUR, height=0.7)
            labels = axis.bar_label(bars, [table[name][column] for name in names], padding=3)
            axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
            axis.margins(x=0.18)
            axis.tick_params(length=0, labelbottom=False)
            axis.spines[:].set_visible(False)
            for name, bar, label in zip(names, bars, labels, strict=True):
                if name.startswith(OUR_NAME):
                    bar.set_color(OUR_COLOUR)
                    label.set_fontweight("bold")
        for tick in axes[0].get_yticklabels():
            if tick.get_text().startswith(OUR_NAME):
                tick.set_fontweight("bold")
        axes[0].invert_yaxis()
        figure.supxlabel("shorter bars are better", fontsize=8)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1] != "--plot-only":
        page = replace_tables(page, Path(sys.argv[1]))
        PAGE.write_text(page, encoding="utf-8")
    matplotlib.use("svg")
    draw(read_table(page, CLASS), PLOT)


if __name__ == "__main__":
    main()
