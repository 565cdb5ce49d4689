"""Every block of code in README and docs is run, or marked with why it is not; what is not run is at least parsed."""

import contextlib
import re
from pathlib import Path

import pytest

from funcpipe.cli.commands import parse
from tests.docs.pages import PAGES, ROOT, RUN, SHOWN, WHY_NOT, Block, blocks, commands, fences, run
from tests.ray_here import environment_of_ray

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN_PAGES = sorted({block.page for block in BLOCKS if block.why_not is None})


def test_every_block_is_run_or_marked() -> None:
    for page in PAGES:
        languages = fences(page)
        assert set(languages) <= {*RUN, *SHOWN}, f"{page}: name the language of every block"
        mine = [block for block in BLOCKS if block.page == page]
        assert len(mine) == sum(language in RUN for language in languages), page
        assert {block.why_not for block in mine} <= {None, *WHY_NOT}, page


def test_commands_stand_in_blocks() -> None:
    """An indented line is a block too, but none that is run."""
    for page in PAGES:
        text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.findall(r"^(?: {4}|\t)(?:funcpipe|python|make|pip) .*$", text, flags=re.MULTILINE), page


def not_run(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.why_not and block.language == language]


def test_python_that_is_not_run_is_python() -> None:
    assert not_run("python")
    for block in not_run("python"):
        assert compile(block.text, str(block), "exec").co_code


def test_commands_that_are_not_run_exist() -> None:
    """With these options, which the parser of the command line admits; modules and targets of make are there."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for block in not_run("shell"):
        check_commands(block, targets)


def check_commands(block: Block, targets: set[str]) -> None:
    found = [words for words in commands(block.text) if words[0] in ("funcpipe", "python", "make", "pip")]
    assert found, str(block)
    for words in found:
        match words:
            case ["funcpipe", *arguments]:
                assert parse(arguments), str(block)
            case ["python", "-m", module, *_]:
                assert (ROOT / f"{module.replace('.', '/')}.py").exists(), str(block)
            case ["make", target, *_]:
                assert target in targets, str(block)
            case _:
                assert words[:2] == ["pip", "install"], str(block)


LONG_PAGES = ("docs/coming_from.md", "docs/extending.md", "docs/sweeps.md")
"""The pages that take many seconds; examples, contract suites and the tests of sweeps do the same."""

RAY_PAGES = ("docs/coming_from.md",)
"""The pages that start a Ray."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.long) if page in LONG_PAGES else page for page in RUN_PAGES]
)
def test_a_page_runs(page: str, folder: Path) -> None:
    mine = [block for block in BLOCKS if block.page == page]
    with environment_of_ray(folder) if page in RAY_PAGES else contextlib.nullcontext():
        done, skipped = run(page, folder)
    assert skipped == sum(block.why_not is not None for block in mine)
    assert done >= len(mine) - skipped > 0


def test_commands_of_a_shell_are_told_apart() -> None:
    text = "first --a 'b & c' > file  # and so on\nsecond \\\n  --url s3://b/k?x=1 && third | fourth\n"
    assert list(commands(text)) == [
        ["first", "--a", "b & c"],
        ["second", "--url", "s3://b/k?x=1"],
        ["third"],
        ["fourth"],
    ]
