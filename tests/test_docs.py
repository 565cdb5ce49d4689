"""Pages that follow from the code say what the code says."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_files_is_up_to_date() -> None:
    """If not: `python scripts/file_tree.py` writes it anew."""
    spec = importlib.util.spec_from_file_location("file_tree", ROOT / "scripts" / "file_tree.py")
    assert spec is not None
    assert spec.loader is not None
    file_tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file_tree)
    assert (ROOT / "docs" / "files.md").read_text() == file_tree.page()


def test_the_tests_that_pages_name_exist() -> None:
    named = {
        (page.name, name)
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`(?:tests/)?((?:[a-z0-9_]+/)*test_\w+\.py)`", page.read_text())
    }
    assert len(named) > 10
    assert {(page, name) for page, name in named if not (ROOT / "tests" / name).exists()} == set()
