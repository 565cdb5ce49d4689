"""Every table of measured or predicted numbers names the script that makes it, and the script is there."""

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT

_NUMBER = re.compile(r"^[~<$≤]*-?\d[\d,.]*(?:e-?\d+)?\s*(?:%|s|MB|ms|×)?(?:,? *[($]*[\d.,]+\)?)*$")
_SCRIPT = re.compile(
    r"experiments[./]\w[\w./]*|scripts/\w+\.py|`make [\w-]+`|`funcpipe platforms measure|^\| `\w+\.py` \|", re.MULTILINE
)
_PAST = re.compile(r"`(experiments/[\w/]+\.py)`\s+at\s+([0-9a-f]+)")

NOT_MEASURED = {
    ("docs/aliyun.md", "price"): "list prices, each with its source",
    ("docs/running.md", "exit code"): "the code says so",
    ("docs/cost.md", "limit"): "limits of the vendors, with their sources",
}
"""Tables of numbers that no script finds, by page and a title of a column, and where the numbers are from."""


def tables(page: str) -> Iterator[tuple[str, list[list[str]], str]]:
    """The first line of each table of a page, its rows, and the text of the section around it."""
    text = (ROOT / page).read_text()
    for section in re.split(r"(?=^#+ )", text, flags=re.MULTILINE):
        for found in re.finditer(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
            first, _, *rows = found.group().splitlines()
            yield first, [[cell.strip() for cell in row.strip("|").split("|")] for row in rows], section


def has_numbers(rows: list[list[str]]) -> bool:
    """Whether at least a third of a table's cells, the first column left out, are numbers."""
    cells = [cell for row in rows for cell in row[1:]]
    return 3 * sum(_NUMBER.match(cell) is not None for cell in cells) >= len(cells) > 0


def test_tables_of_numbers_name_their_script() -> None:
    for page, (first, rows, section) in ((each, table) for each in PAGES for table in tables(each)):
        titles = [cell.strip() for cell in first.strip("|").split("|")]
        if has_numbers(rows) and not any((page, title) in NOT_MEASURED for title in titles):
            assert _SCRIPT.search(section), f"{page}: name the script that makes this table: {first}"


def test_tables_of_numbers_are_told_from_others() -> None:
    found = {page for page in PAGES for _, rows, _ in tables(page) if has_numbers(rows)}
    assert found >= {"README.md", "docs/storage.md", "docs/training.md", "docs/concepts.md", "docs/results.md"}


def test_scripts_that_pages_name_exist() -> None:
    for page in PAGES:
        check_scripts_of(page)


def check_scripts_of(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {name.replace(".", "/") + ".py" for name in re.findall(r"python\s+-m\s+(experiments[\w.]*\w)", text)}
    named |= set(re.findall(r"`((?:experiments|scripts)/[\w/]+\.py)`(?!\s+at\s)", text))
    named |= {f"experiments/{name.replace('.', '/')}.py" for name in re.findall(r"`experiments\.([a-z][\w.]*)`", text)}
    if "| script in `experiments/studies/` |" in text:
        named |= {f"experiments/studies/{name}" for name in re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)}
    missing = {name for name in named if not (ROOT / name).exists() and not (ROOT / name[:-3]).is_dir()}
    assert missing == set(), page
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets, page


def test_scripts_that_pages_name_at_a_commit_are_in_its_tree() -> None:
    """As `experiments/studies/NAME.py` at COMMIT: they have measured, and gone."""
    past = {found for page in PAGES for found in _PAST.findall((ROOT / page).read_text())}
    assert len(past) > 10
    if subprocess.run(["git", "rev-parse", "--verify", "HEAD~100"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("the repository's history is not here")
    names = [f"{commit}:{name}" for name, commit in sorted(past)]
    found = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        input="\n".join(names),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line for line in found.stdout.splitlines() if " blob " not in line] == []


def test_tables_that_follow_from_the_planner_are_up_to_date() -> None:
    """If not: `python scripts/doc_figures.py` writes them anew. A row of each is planned again."""
    figures = script()
    rows = {"compared": figures.compared(["ResNet-101"]), "weighed": figures.weighed([figures.TIME_VALUE])}
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    for name, pages in (("compared", ["README.md", "docs/results.md"]), ("weighed", ["docs/concepts.md"])):
        assert [page for page, text in texts.items() if name in figures.tables_in(text)] == pages
        head, rule, row = rows[name]
        for page in pages:
            assert head + rule in texts[page], page
            assert row in texts[page], page


def test_every_picture_is_shown_and_has_a_script() -> None:
    """A line below each picture names what draws it."""
    pictures = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.png")}
    shown: set[str] = set()
    for page in PAGES:
        text = (ROOT / page).read_text()
        for found in re.finditer(r"!\[[^\]]*\]\(([^)]+)\)\n+(.*(?:\n.+)*)", text):
            shown.add(found.group(1).removeprefix("docs/"))
            assert _SCRIPT.search(found.group(2)), f"{page}: name what draws {found.group(1)}"
        shown |= {found.removeprefix("docs/") for found in re.findall(r'<img src="([^"]+)"', text)}
    assert shown == pictures


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_figures", ROOT / "scripts" / "doc_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
