"""The site is built without a warning, loads nothing from other hosts, and has every public name in its reference."""

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import funcpipe
from tests.docs.pages import DOCS, PAGES, ROOT

_SOURCES = ("funcpipe", "experiments", "examples", "scripts", "tests")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def test_the_reference_has_every_public_name_once() -> None:
    named = Counter(
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: funcpipe\.(\w+)$", page.read_text(), flags=re.MULTILINE)
    )
    assert named == Counter(funcpipe.__all__)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_pages_outside_the_site_lead_somewhere(page: str) -> None:
    """The generator looks after the others."""
    for link in _LINK.findall((ROOT / page).read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = ROOT / (path or page)
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_pages_link_into_the_repository_by_its_files() -> None:
    """What stands outside docs/ is named by its path, which a reader of the site can find in the source."""
    for page in DOCS.rglob("*.md"):
        for link in _LINK.findall(page.read_text()):
            assert "://" in link or (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS), (page, link)


def test_files_that_pages_name_exist() -> None:
    """By their whole paths or the ends of them, such as `comm/channel.py`."""
    files = [path.relative_to(ROOT).as_posix() for top in _SOURCES for path in (ROOT / top).rglob("*.py")]
    for page in PAGES:
        for named in re.findall(r"`([\w./]+/\w+\.py)`(?!\s+at\s)", (ROOT / page).read_text()):
            assert any(f"/{file}".endswith(f"/{named}") for file in files), (page, named)


def test_the_site_is_built_and_needs_no_other_host(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr  # which --quiet would hide, and not count
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and one for what is not found
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        assert [url for url in loaded.urls if url.startswith(("http:", "https:", "//"))] == [], page.name


class _Loaded(HTMLParser):
    """The addresses of what a browser loads to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source") or (tag == "link" and values.get("rel") == "stylesheet"):
            self.urls += [value for key in ("src", "href") if (value := values.get(key))]


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
