"""A pytest plugin: how the processes of pytest-xdist share the tests, with `--dist loadgroup`.

A process that runs one test of a file runs all of them, as what they share is made in each process that needs it:
fixtures, servers, processes that functions are forked from, libraries that the tests import. Those of a group, and of
a folder in `FOLDERS`, are together in the same way. What takes longest comes first, so that no process is left alone
with it in the end.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

from tests.support.durations import TABLE, test_of

FOLDERS = ("tests/platforms/aws/", "tests/platforms/aliyun/", "tests/contract/")
"""The folders whose files have a server in common, or what functions are forked from."""


def unit_of(name: str) -> str:
    """What a test is run together with: its group, its folder or its file."""
    if test_of(name) != name:
        return name.rpartition("@")[2]
    file = name.partition("::")[0]
    return next((folder for folder in FOLDERS if file.startswith(folder)), file)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the processes that run tests, once pytest-xdist has added groups to names: put the longest units first."""
    if hasattr(config, "workerinput") and config.getvalue("loadgroup"):
        seconds: dict[str, float] = json.loads(TABLE.read_text())
        places = longest_first([item.nodeid for item in items], seconds)
        items.sort(key=lambda item: places[unit_of(item.nodeid)])


def longest_first(names: Iterable[str], seconds: Mapping[str, float]) -> dict[str, int]:
    """The place of each unit of these tests."""
    took = dict[str, float]()
    for name in names:
        took[unit_of(name)] = took.get(unit_of(name), 0.0) + seconds.get(test_of(name), 0.0)
    return {unit: place for place, unit in enumerate(sorted(took, key=lambda unit: -took[unit]))}


class InUnits(LoadGroupScheduling):  # type: ignore[misc]
    """Gives a process a whole unit at a time, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InUnits | None:
    """Replace pytest-xdist's own, which takes each test that is in no group for itself."""
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False
    return InUnits(config, log)
