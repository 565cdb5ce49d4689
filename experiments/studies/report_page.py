"""How long a headless Chromium takes to open a report of 20 functions and 20 steps, until its charts are drawn.

``python -m experiments.studies.report_page``, with ``--screenshots FOLDER`` for the pictures of docs/report.md too. All
functions and steps are simulated; the browser is real.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from funcpipe.report.html.page import write_page
from scripts.chromium import NAMES
from tests.report.html.large import material

_VIEWS = {"desktop": (1280, 1500, "light"), "phone": (375, 1100, "light"), "dark": (1280, 1500, "dark")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--screenshots", type=Path)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise SystemExit("there is no Chromium; run: make chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        large = Path(folder, "large.html")
        write_page(material(stages=10, replicas=2, micro_batches=3, steps=20), large)
        spent_s = [_opened(browser, large, "desktop")[1] for _ in range(options.repeats)]
        print(f"{large.stat().st_size / 1e6:.1f} MB; opened in {statistics.median(spent_s):.2f} s (median), ", end="")
        print(f"{min(spent_s):.2f} to {max(spent_s):.2f} s, first {spent_s[0]:.2f} s")
        if options.screenshots is not None:
            small = Path(folder, "small.html")
            write_page(material(stages=3, micro_batches=4, steps=6), small)
            for name in _VIEWS:
                page, _ = _opened(browser, small, name)
                if name == "dark":
                    page.locator("#timeline").evaluate("section => section.scrollIntoView()")
                page.screenshot(path=options.screenshots / f"report_{name}.png")


def _opened(browser: Any, path: Path, view: str) -> tuple[Any, float]:
    """The page, and the seconds until two frames after its charts are there."""
    width, height, scheme = _VIEWS[view]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=yes]", state="attached")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page, time.perf_counter() - begun


if __name__ == "__main__":
    main()
