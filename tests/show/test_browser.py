"""The page in a headless Chromium: no error, no sideways scrolling, light and dark, by keyboard, without network."""

from pathlib import Path
from typing import Any

import pytest

from funcpipe.show.page import write_page
from tests.examples import in_long_run
from tests.show.large import material
from tests.support.browser import WAIT_MS

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    write_page(material(), path)
    return path.as_uri()


def opened(browser: Any, address: str, *, width: int = 1280, scheme: str = "light") -> tuple[Any, list[str]]:
    """The page once its charts are drawn, and what went wrong in it so far; the browser is offline."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    context.set_default_timeout(WAIT_MS)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
    page.goto(address)
    page.wait_for_selector("html[data-drawn=yes]", state="attached")
    return page, wrong


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 375), *in_long_run([("light", 375), ("dark", 1280)])]
)
def test_it_opens_without_an_error_and_fits(browser: Any, address: str, width: int, scheme: str) -> None:
    page, wrong = opened(browser, address, width=width, scheme=scheme)
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    charts = page.locator(".chart").all()
    assert len(charts) == 7
    assert all(chart.get_attribute("aria-label") for chart in charts)
    text = page.evaluate("getComputedStyle(document.body).color")
    axis = page.evaluate("Bokeh.documents[0].roots()[0].below[0].major_label_text_color")
    assert (axis, text) == {
        "light": ("#1b2129", "rgb(27, 33, 41)"),
        "dark": ("#e7ebf0", "rgb(231, 235, 240)"),
    }[scheme]
    page.context.close()


def test_the_keyboard_reaches_the_report_and_zooms(browser: Any, address: str) -> None:
    page, wrong = opened(browser, address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'content'")
    width = (
        "(() => { const r = Bokeh.documents[0].roots().find(f => f.toolbar.tools.some(t => t.type === 'WheelZoomTool'))"
        ".x_range; return r.end - r.start; })()"
    )
    before = page.evaluate(width)
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(width) == pytest.approx(before / 2)
    page.get_by_role("button", name="Later").focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Whole").focus()
    page.keyboard.press("Space")
    assert page.evaluate(width) == pytest.approx(before)
    assert page.get_by_role("heading", level=1).count() == page.get_by_role("main").count() == 1
    assert wrong == []
    page.context.close()
