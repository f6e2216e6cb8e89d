"""The check of the built site finds what the strict build passes over."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HEAD = "<html><head><link rel='stylesheet' href='style.css'></head><body>"
GOOD = HEAD + "<h1 id='top'>A</h1><a href='b.html#there'>b</a><a href='https://example.org/'>elsewhere</a>"


@pytest.fixture(name="check_site")
def fixture_check_site() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "check_site.py"
    spec = importlib.util.spec_from_file_location("check_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="site")
def fixture_site(tmp_path: Path) -> Path:
    for name in ("docs/a.md", "docs/b.md", "site/a.html", "site/b.html", "site/style.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "site/a.html").write_text(GOOD, encoding="utf-8")
    (tmp_path / "site/b.html").write_text("<p id='there'>", encoding="utf-8")
    (tmp_path / "site/style.css").write_text("a { background: url(data:image/svg+xml;x) }", encoding="utf-8")
    return tmp_path


def found(check_site: ModuleType, folder: Path, nav: object = ({"A": "a.md"}, {"More": [{"B": "b.md"}]})) -> list[str]:
    return list(check_site.faults(folder / "site", {"nav": nav}, folder / "docs"))


def test_a_good_site_has_no_faults(check_site: ModuleType, site: Path) -> None:
    assert found(check_site, site) == []


@pytest.mark.parametrize(
    ("element", "fault"),
    [
        ("<script src='https://unpkg.com/x.js'></script>", "loads https://unpkg.com/x.js"),
        ("<img src='//example.org/x.png'>", "loads //example.org/x.png"),
        ("<link rel='preconnect' href='https://fonts.gstatic.com'>", "loads https://fonts.gstatic.com"),
        ("<style>@import 'https://example.org/x.css';</style>", "loads https://example.org/x.css"),
        ("<p style='background: url(http://example.org/x.png)'>", "loads http://example.org/x.png"),
        ("<pre class='mermaid'>", "has the class mermaid, which fetches a library"),
        ("<a href='gone.html'>x</a>", "gone.html leads nowhere"),
        ("<a href='../docs/a.md'>x</a>", "../docs/a.md leads nowhere"),
        ("<img src='gone.png'>", "gone.png leads nowhere"),
        ("<a href='b.html#gone'>x</a>", "b.html#gone: there is no such place on that page"),
        ("<a href='#gone'>x</a>", "#gone: there is no such place on that page"),
    ],
)
def test_what_a_page_loads_and_links_to_is_checked(
    check_site: ModuleType, site: Path, element: str, fault: str
) -> None:
    (site / "site/a.html").write_text(GOOD + element, encoding="utf-8")
    assert found(check_site, site) == [f"a.html: {fault}"]


def test_a_style_sheet_that_loads_from_elsewhere_is_a_fault(check_site: ModuleType, site: Path) -> None:
    (site / "site/style.css").write_text('@font-face { src: url("https://example.org/f.woff") }', encoding="utf-8")
    assert found(check_site, site) == ["style.css: loads https://example.org/f.woff"]


def test_navigation_and_pages_are_the_same(check_site: ModuleType, site: Path) -> None:
    (site / "docs/orphan.md").touch()
    (site / "site/b.html").rename(site / "site/c.html")
    (site / "site/a.html").write_text("", encoding="utf-8")
    nav = ["a.md", "b.md", "gone.md"]
    assert found(check_site, site, nav) == [
        "gone.md: in the navigation, but there is no such page",
        "orphan.md: not in the navigation",
        "b.md: was not built",
    ]
