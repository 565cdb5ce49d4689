"""Tests of a group, of a file and of some folders are kept in one process: two Rays at once do not fit on a machine."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.support.shares import FOLDERS, longest_first, unit_of

ROOT = Path(__file__).parents[2]

MODULE = """
import os
from pathlib import Path

import pytest

{mark}
@pytest.mark.parametrize("number", range(6))
def test_its_process_is_noted(number):
    Path(f"{file}.{{number}}.{{os.environ['PYTEST_XDIST_WORKER']}}").touch()
"""


def test_one_process_runs_all_tests_of_a_group_or_file(tmp_path: Path) -> None:
    files = dict.fromkeys(("test_a", "test_b", "test_c"), "")
    files |= dict.fromkeys(("test_first", "test_second"), '@pytest.mark.xdist_group("ray")')
    for file, mark in files.items():
        (tmp_path / f"{file}.py").write_text(MODULE.format(mark=mark, file=file))
    plugins = ["-p", "xdist", "-p", "tests.support.durations", "-p", "tests.support.shares"]
    words = [sys.executable, "-m", "pytest", *plugins, "-n", "2", "--dist", "loadgroup", "--rootdir", "."]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = alone | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 passed" in done.stdout
    processes = defaultdict[str, set[str]](set)
    for path in tmp_path.glob("*.gw*"):
        file, _, process = path.name.split(".")
        processes["a group" if files[file] else file].add(process)
    assert {unit: len(found) for unit, found in processes.items()} == dict.fromkeys(
        ("a group", "test_a", "test_b", "test_c"), 1
    ), "two processes shared the tests of one unit"
    assert set.union(*processes.values()) == {"gw0", "gw1"}


def test_the_units_that_take_longest_come_first() -> None:
    group = ["tests/x/test_a.py::test_ray@ray", "tests/y/test_b.py::test_ray[a@b]@ray"]
    files = ["tests/x/test_a.py::test_a", "tests/x/test_a.py::test_a[b@c]", "tests/y/test_b.py::TestB::test_b"]
    folder = ["tests/contract/test_c.py::test_c", "tests/contract/test_d.py::test_d"]
    assert [unit_of(name) for name in group + files + folder] == [
        *("ray", "ray", "tests/x/test_a.py", "tests/x/test_a.py", "tests/y/test_b.py"),
        *("tests/contract/", "tests/contract/"),
    ]
    took = {"tests/y/test_b.py::test_ray[a@b]": 1.0, "tests/contract/test_d.py::test_d": 3.0, files[0]: 2.0}
    found = longest_first([*files, *group, *folder], took)
    assert sorted(found, key=lambda unit: found[unit]) == [
        *("tests/contract/", "tests/x/test_a.py", "ray", "tests/y/test_b.py")
    ]
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
