"""Check the built site for what the strict build passes over: `python docs/check_site.py build/site`.

Every page of docs/ is in the navigation and was built; every local link, image, style and script leads to a file, and
every anchor to an element; and no page, style or script element loads anything from another host. Each fault is a
line on standard error; the exit code is 1 if there is one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
_STYLE_LOADS = re.compile(r"@import\s*[^;]*|url\(([^)]*)\)")
_LOADING = {"src", "srcset", "poster", "data", "action", "formaction", "background"}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
# Elements for which the theme's script fetches a library from elsewhere: diagrams, image viewers, Python in the page.
_FETCHING_CLASSES = {"mermaid", "glightbox", "pyodide"}


class Page(HTMLParser):
    """What a page loads, links to, and has as anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what one element loads or links to."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.classes |= set(values.get("class", "").split())
        self.loads += [values[name] for name in sorted(_LOADING & values.keys())]
        self.loads += style_loads(values.get("style", ""))
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        elif "href" in values and not (tag == "link" and "canonical" in values.get("rel", "")):
            self.links.append(values["href"])
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        """Leave a style."""
        self._in_style = False

    def handle_data(self, data: str) -> None:
        """Note what a style loads."""
        if self._in_style:
            self.loads += style_loads(data)


def style_loads(style: str) -> list[str]:
    """Return the addresses that a style sheet loads."""
    found = []
    for match in _STYLE_LOADS.finditer(style):
        address = match[1] if match[1] is not None else match[0].removeprefix("@import")
        found.append(address.strip(" \t\n'\""))
    return found


def is_remote(address: str) -> bool:
    """Whether an address is on a host; data and blobs are not."""
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "ws", "wss", "ftp")


def faults(site: Path, config: dict[str, Any], docs: Path) -> Iterator[str]:
    """Yield what is wrong with a built site."""
    listed = set(nav_pages(config["nav"]))
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    yield from (f"{name}: in the navigation, but there is no such page" for name in sorted(listed - written))
    yield from (f"{name}: not in the navigation" for name in sorted(written - listed))
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for name in sorted(listed & written):
        if (site / name).with_suffix(".html").resolve() not in pages:
            yield f"{name}: was not built"
    for path, page in sorted(pages.items()):
        page_name = path.relative_to(site.resolve())
        yield from (f"{page_name}: loads {address}" for address in page.loads if is_remote(address))
        yield from (
            f"{page_name}: has the class {it}, which fetches a library" for it in page.classes & _FETCHING_CLASSES
        )
        if page_name.name != "404.html":  # its addresses are those of a site at the top of a host
            yield from broken(path, page, pages, site.resolve())
    for path in sorted(site.rglob("*.css")):
        loads = style_loads(path.read_text(encoding="utf-8"))
        yield from (f"{path.relative_to(site)}: loads {address}" for address in loads if is_remote(address))


def broken(path: Path, page: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    """Yield the local addresses of a page that lead nowhere."""
    for address in [*page.loads, *page.links]:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        if not target.is_relative_to(site) or not target.is_file():
            yield f"{path.relative_to(site)}: {address} leads nowhere"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"{path.relative_to(site)}: {address}: there is no such place on that page"


def nav_pages(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, level by level."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(item)


def main(site: Path) -> int:
    """Print what is wrong with a site; return the exit code."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    count = 0
    for fault in faults(site, config, ROOT / config["docs_dir"]):
        count += 1
        sys.stderr.write(fault + "\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
