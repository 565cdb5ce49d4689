"""Pages name tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tests_that_pages_name_exist() -> None:
    named = {
        (page.name, name)
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`(?:tests/)?((?:[a-z0-9_]+/)*test_\w+\.py)`", page.read_text())
    }
    assert len(named) > 10
    assert {(page, name) for page, name in named if not (ROOT / "tests" / name).exists()} == set()
