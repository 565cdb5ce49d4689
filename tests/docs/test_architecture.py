"""The page on architecture names the keys and functions that the code has."""

import ast
import re
from pathlib import Path

from funcpipe.runstate import run_objects

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def keys_below(place: str) -> list[str]:
    """The keys in the first column of the table below `place`."""
    table = PAGE.split(f"Below `{place}`", 1)[1].split("|---|---|\n", 1)[1].split("\n\n", 1)[0]
    return [key for row in table.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_it_has_each_key_of_a_run_once() -> None:
    assert sorted(keys_below("RUN/")) == sorted(run_objects.OF_RUN)
    assert sorted(keys_below("RUN/gGENERATION/")) == sorted(run_objects.OF_GENERATION)


def test_each_stop_of_a_job_is_in_its_file() -> None:
    stops = re.findall(r"^\| \d+\. `(?:\w+\.)?(\w+)` \| `([\w/]+\.py)` \|", PAGE, flags=re.MULTILINE)
    assert len(stops) >= 9
    for name, file in stops:
        tree = ast.parse((ROOT / "funcpipe" / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (name, file)
