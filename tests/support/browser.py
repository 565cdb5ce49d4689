"""A pytest plugin: a headless Chromium, for the tests that open pages in one."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.chromium import NAMES

WAIT_MS = 120_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, started by playwright; a test that wants it is skipped where either is missing."""
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        pytest.skip("there is no Chromium; run: make chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=WAIT_MS)
        yield found
        found.close()
