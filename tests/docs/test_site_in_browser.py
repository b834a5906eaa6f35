"""The built site as a reader sees it: in a headless Chromium, at two widths and in both themes."""

from __future__ import annotations

import functools
import http.server
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.tools import ROOT, browser

pytestmark = pytest.mark.slow
WIDTHS = (1280, 390)
THEMES = ("light", "dark")
# Text whose contrast is below 4.5, the least that WCAG 2 asks of text; at most one of each kind.
FAINT = """
const rgba = text => text.match(/[\\d.]+/g).map(Number);
const light = c => c.slice(0, 3).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const over = (a, b) => a.slice(0, 3).map((x, i) => x * (a[3] ?? 1) + b[i] * (1 - (a[3] ?? 1)));
const behind = e => {
    if (e === null) return [255, 255, 255];
    const own = rgba(getComputedStyle(e).backgroundColor);
    return (own[3] ?? 1) === 1 ? own : over(own, behind(e.parentElement));
};
const faint = {};
for (const kind of ['p', 'li', 'td', 'th', 'pre code', 'p code', 'p a', 'h2']) {
    for (const e of [...document.querySelectorAll('article ' + kind)].slice(0, 20)) {
        const back = behind(e), [a, b] = [light(over(rgba(getComputedStyle(e).color), back)), light(back)];
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) faint[kind] = contrast.toFixed(2);
    }
}
return faint;
"""
WRONG = """
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const code = [...document.querySelectorAll('pre code')].filter(e => e.scrollWidth > e.clientWidth);
const tables = [...document.querySelectorAll('.md-typeset__scrollwrap')].filter(e => e.scrollWidth > e.clientWidth);
const scrolling = window.innerWidth >= 1280 ? tables.length : 0;  // on a telephone wide tables scroll in their frame
const dead = [...document.images].filter(e => !e.complete || e.naturalWidth === 0).map(e => e.src);
const style = (e, ...kind) => getComputedStyle(e, ...kind);
const covered = [...document.querySelectorAll('pre code > span')].filter(line => {
    const number = line.querySelector('[data-linenos]');
    return number && parseFloat(style(line).paddingLeft) + parseFloat(style(line).textIndent)
        < parseFloat(style(number, '::before').width);
});
return [wide > 0 && `${wide} px too wide`, code.length > 0 && `${code.length} blocks of code do not fit`,
        scrolling > 0 && `${scrolling} tables do not fit`,
        covered.length > 0 && `${covered.length} line numbers lie over code`,
        dead.length > 0 && `images that do not load: ${dead}`].filter(Boolean);
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'tileattn[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: then mkdocs counts no warnings, and --strict finds none.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    # Where ruff is, too: it formats the signatures.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": path}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def pages_of(site: Path) -> list[str]:
    """The site's pages, those that show files last."""
    pages = [page.parent.relative_to(site).as_posix() + "/" for page in site.rglob("index.html")]
    return sorted(pages, key=lambda page: (page.startswith("source/"), page))


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serves the site on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *given: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
def test_every_page_fits_and_can_be_read(site: Path, address: str) -> None:
    pages = [page for page in pages_of(site) if not page.startswith("source/")]
    # Pages that show files are all alike: a few, and the one with the longest name.
    files = [page for page in pages_of(site) if page.startswith("source/")]
    pages += [*files[:2], max(files, key=len)]
    found = []
    with browser.chromium() as driver:
        for theme, width in itertools.product(THEMES, WIDTHS):
            feature = {"name": "prefers-color-scheme", "value": theme}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            driver.get(address)
            driver.execute_script("localStorage.clear()")  # where the site keeps a reader's choice of a theme
            for page in pages:
                driver.get(f"{address}/{page}")
                scheme = driver.execute_script("return document.body.dataset.mdColorScheme")
                assert scheme == {"light": "default", "dark": "slate"}[theme]
                wrong = driver.execute_script(WRONG)
                faint = driver.execute_script(FAINT) if width == WIDTHS[0] else {}
                if wrong or faint:
                    found.append(f"{page} at {width} px, {theme}: {wrong} contrast {faint}")
    assert not found, "\n".join(found)


class Links(HTMLParser):
    """What a page links to, shows, and names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.names |= {str(given[key]) for key in ("id", "name") if given.get(key)}
        self.targets |= {str(given[key]) for key in ("href", "src") if given.get(key)}


def test_no_link_is_dead(site: Path) -> None:
    """Between the pages of the site, with their anchors. Other machines are not asked."""
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html")}
    dead = []
    for page, links in pages.items():
        if page.name == "404.html":
            continue
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            at = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            at = at / "index.html" if at.is_dir() else at
            anchor = unquote(parts.fragment)
            if not at.is_file() or (anchor and at in pages and anchor not in pages[at].names):
                dead.append((page.relative_to(site).as_posix(), target))
    assert not dead
    assert sum(target.count("source/") for links in pages.values() for target in links.targets) > 100


def test_signatures_are_formatted(site: Path) -> None:
    """One parameter a line, where a signature is long: by ruff."""
    text = "".join(data for data in _text((site / "api/index.html").read_text()))
    assert "\n    q: Tensor,\n    k: Tensor,\n    v: Tensor,\n" in text


def _text(html: str) -> list[str]:
    texts: list[str] = []
    parser = HTMLParser()
    parser.handle_data = texts.append  # type: ignore[method-assign]
    parser.feed(html)
    return texts
