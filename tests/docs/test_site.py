"""The site is built without a warning, loads nothing from other hosts, and has every public name in its reference."""

import configparser
import html
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, EnumType
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

import funcpipe
from funcpipe import FuncPipe
from funcpipe.core.settings import RunKeywords
from tests.docs.pages import DOCS, PAGES, ROOT
from tests.support.browser import WAIT_MS

_SOURCES = ("funcpipe", "experiments", "examples", "scripts", "tests")
_SIGNATURE = re.compile(r'<div class="doc-signature[^>]*>(.*?)</div>', re.DOTALL)
_CHOICES = re.compile(r"<p>One of .*?</p>")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def test_the_reference_has_every_public_name_once() -> None:
    named = Counter(
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: funcpipe\.(\w+)$", page.read_text(), flags=re.MULTILINE)
    )
    assert named == Counter(funcpipe.__all__)


def test_each_parameter_of_funcpipe_is_in_a_list() -> None:
    """That of its method, or of the one whose arguments the others are by its text."""
    methods = {"FuncPipe": FuncPipe} | dict(inspect.getmembers(FuncPipe, inspect.isfunction))
    texts = {name: inspect.getdoc(method) or "" for name, method in methods.items() if not name.startswith("_")}
    for name, text in texts.items():
        described = set(re.findall(r"^    (\w+): ", text, flags=re.MULTILINE))
        while found := re.search(r"are\s+those\s+of\s+`(\w+)`", text):
            text = texts[found.group(1)]
            described |= set(re.findall(r"^    (\w+): ", text, flags=re.MULTILINE))
        if "settings" in described:
            described |= RunKeywords.__annotations__.keys()
        assert set(_parameters(methods[name])) <= described, name


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_first_page_has_how_to_install_and_train_version_licence_and_a_picture(page: str) -> None:
    text, setup = (ROOT / page).read_text(), configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for part in (
        "pip install .\n",
        "FuncPipe(model",
        f"ersion {setup['metadata']['version']}, Apache-2.0",
        "timeline.png",
    ):
        assert part in text, part


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, which is built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr  # which --quiet would hide, and not count
    return folder


@pytest.mark.xdist_group("browser")
def test_the_site_needs_no_other_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and one for what is not found
    for page in pages:
        loaded = _Loaded()
        loaded.feed(page.read_text())
        assert [url for url in loaded.urls if url.startswith(("http:", "https:", "//"))] == [], page.name


@pytest.mark.xdist_group("browser")
def test_the_reference_has_every_signature(site: Path) -> None:
    """Of each exported name and each method of FuncPipe, with the keywords that several of them share."""
    pages = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    entries = dict(re.findall(r'<h\d id="funcpipe\.([\w.]+)" class="doc(.*?)(?=<h\d id=|</article>)', pages, re.DOTALL))
    called: dict[str, Callable[..., Any]] = {name: getattr(funcpipe, name) for name in funcpipe.__all__}
    methods = {name: value for name, value in inspect.getmembers(FuncPipe, callable) if not name.startswith("_")}
    assert len(methods) >= 14
    called |= {f"FuncPipe.{name}": method for name, method in methods.items()}
    for name, value in called.items():
        where = _CHOICES if isinstance(value, EnumType) else _SIGNATURE
        shown = html.unescape(re.sub(r"<[^>]+>", "", next(iter(where.findall(entries[name])), "")))
        missing = [each for each in _parameters(value) if not re.search(rf"[(\s]\**{each}(?!\w)", shown)]
        assert missing == [], name


@pytest.mark.xdist_group("browser")
def test_its_search_works_in_pages_opened_from_disk(site: Path, browser: Any) -> None:
    context = browser.new_context(offline=True)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").wait_for(state="attached")
    page.keyboard.press("s")
    page.keyboard.type("optimize_forward")
    page.wait_for_selector(".md-search-result__link[href*='reference/funcpipe.html']", state="attached")
    context.close()


def _parameters(value: Callable[..., Any]) -> Iterator[str]:
    """The names of what it is called with, with the keywords of `Unpack[…]`; a choice's words."""
    if isinstance(value, EnumType):
        members: Iterable[Enum] = value.__members__.values()
        yield from (f"'{member.value}'" for member in members)
        return
    if isinstance(value, type) and issubclass(value, BaseException):
        return
    for name, parameter in inspect.signature(value).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (keywords,) = get_args(parameter.annotation)
            yield from keywords.__annotations__
        elif name != "self":
            yield name


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
