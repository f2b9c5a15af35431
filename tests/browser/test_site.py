"""The site that `make site` builds, in a real browser: every link, the search, a phone, the dark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml
from reading import Reader

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages. What mkdocs warns of is an error."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return built


class Quiet(SimpleHTTPRequestHandler):
    """A server that says nothing."""

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def test_every_link_of_every_page_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 40
    lost, elsewhere = [], set()
    for path, page in pages.items():
        for link in page.links:
            where, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", where):
                elsewhere.add(where)
                continue
            target = (path.parent / where).resolve() if where else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost
    assert not [link for link in elsewhere if not link.startswith("https://")]


def test_everything_public_is_on_the_site(site: Path) -> None:
    import ckptstore
    from ckptstore.tools.cli import COMMANDS

    names = Page(site / "reference/api.html").anchors | Page(site / "reference/errors.html").anchors
    text = (site / "reference/errors.html").read_text()
    for name in set(ckptstore.__all__) - {"__version__"}:
        assert name.lower() in names or name in text, f"{name} is not documented"
    commands = Page(site / "reference/cli.html").anchors
    assert {f"ckptstore-{name}" for name in COMMANDS} <= commands
    assert "Made of the code" not in (site / "reference/events.html").read_text()


def test_search_finds_a_page(reader: Reader, address: str) -> None:
    reader.resize(1100, 900)
    reader.driver.get(f"{address}/index.html")
    reader.driver.get_log("browser")
    reader.one(".md-search__input").click()
    reader.one(".md-search__input").send_keys("fenced")
    reader.until(lambda: any("resume" in link.get_attribute("href") for link in reader.all(".md-search-result__link")))
    assert reader.errors() == []


PAGES = ["index", "quickstart", "how-to/state", "how-to/ray-train", "performance", "reference/cli", "reference/api"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_phone_in_the_dark(reader: Reader, address: str, page: str) -> None:
    reader.resize(360, 740)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    reader.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    reader.driver.get("about:blank")  # a page of the site would write again what it remembers
    what = {"origin": address, "storageTypes": "local_storage"}
    reader.driver.execute_cdp_cmd("Storage.clearDataForOrigin", what)
    reader.driver.get_log("performance")
    reader.driver.get(f"{address}/{page}.html")
    reader.until(lambda: reader.run("return document.body.getAttribute('data-md-color-scheme')") == "slate")
    assert reader.overflow() == 0
    assert [link for link in reader.requests() if not link.startswith((address, "data:"))] == []


def test_the_navigation_has_the_six_groups(reader: Reader, address: str) -> None:
    reader.resize(1300, 900)
    reader.driver.get(f"{address}/quickstart.html")
    found = [link.text for link in reader.all(".md-nav--primary > .md-nav__list > .md-nav__item > .md-nav__link")]
    groups = [name for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for name in entry]
    assert found == groups == ["Start", "Frameworks", "Storage", "Operate", "Understand", "Reference"]
