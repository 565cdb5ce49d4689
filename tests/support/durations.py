"""A pytest plugin: the processor seconds of every test, and the table of those that are not quick.

`make durations` runs all tests with `--record-durations`, and writes `tests/durations.json`: a test that takes
`QUICK_S` or more is `slow`, and left out of `make check`. A test that is not in the table is quick.
"""

import json
import os
import re
import resource
import time
from collections.abc import Generator, Iterable
from pathlib import Path

import psutil
import pytest

QUICK_S = 0.2
TABLE = Path(__file__).parents[1] / "durations.json"
_PROPERTY = "processor_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--record-durations", type=Path, metavar="FILE", help="write the processor seconds of all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `slow` those in the table, and those of a group: what they start, such as Ray, is not seen as theirs."""
    slow = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for item in items:
        if test_of(item.nodeid) in slow or item.get_closest_marker("xdist_group") is not None:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test with its fixtures; those that others share count for the first that uses them."""
    if item.config.getoption("--record-durations") is None:
        return (yield)
    item.stash[_BEGAN] = _processor_s()
    return (yield)


_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the process that writes the table, which is another one under pytest-xdist."""
    report = yield
    if call.when == "teardown" and _BEGAN in item.stash:
        report.user_properties.append((_PROPERTY, _processor_s() - item.stash[_BEGAN]))
    return report


def _processor_s() -> float:
    """What this process and all that it started have used, those that still run and those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_used(child) for child in _descendants())


def _descendants() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def _used(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0  # it has ended meanwhile: whoever waited for it counts it
    return float(times.user + times.system + times.children_user + times.children_system)


class Recorder:
    """Collects what the tests of all processes took."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's seconds."""
        for name, value in report.user_properties:
            if name == _PROPERTY:
                self._seconds[test_of(report.nodeid)] = round(float(str(value)), 3)

    def pytest_sessionfinish(self) -> None:
        """Write what was collected."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(dict(sorted(self._seconds.items())), indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the process that starts the others."""
    file = config.getoption("--record-durations")
    if file is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Recorder(file))


def test_of(name: str) -> str:
    """The test's name without the group that pytest-xdist adds to it."""
    return re.sub(r"@[\w ]+$", "", name)


def by_folder(seconds: dict[str, float]) -> dict[str, tuple[int, float]]:
    """How many tests each folder has, and what they take together."""
    folders: dict[str, tuple[int, float]] = {}
    for test, took in seconds.items():
        folder = os.path.join(*Path(test.partition("::")[0]).parts[:2])
        count, total = folders.get(folder, (0, 0.0))
        folders[folder] = count + 1, total + took
    return folders


def slow_of(seconds: dict[str, float]) -> dict[str, float]:
    """The tests that are not quick."""
    return {test: took for test, took in seconds.items() if took >= QUICK_S}


def _lines(folders: dict[str, tuple[int, float]]) -> Iterable[str]:
    for folder, (count, took) in sorted(folders.items(), key=lambda item: -item[1][1]):
        yield f"{folder:40} {count:5} tests {took:8.1f} s"


def main() -> None:
    """Make the table from `out/durations.json`, and print what each folder takes."""
    seconds = json.loads(Path("out/durations.json").read_text())
    TABLE.write_text(json.dumps(slow_of(seconds), indent=0) + "\n")
    folders = by_folder(seconds)
    print("\n".join(_lines(folders)))
    print(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s; {len(slow_of(seconds))} of them are slow")


if __name__ == "__main__":
    main()
