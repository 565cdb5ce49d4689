import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from funcpipe.testing.run_keys import RUN_KEY

settings.register_profile("funcpipe", deadline=None)  # no test is about time
settings.register_profile("quick", settings.get_profile("funcpipe"), max_examples=20)  # what `make check` asks for
settings.load_profile("funcpipe")
torch.set_num_threads(1)  # as in functions: more threads than free processors make torch many times slower

_TESTS = Path(__file__).parent
_PROCESSES = (
    "chaos/",
    "cloud/",
    "e2e/test_failure.py",
    "e2e/test_like.py",
    "e2e/test_measure.py",
    "e2e/test_recovery.py",
    "parameter_server/test_server_functions.py",
    "platforms/entry/",
    "worker/test_hand_over.py",
    "client/test_control.py",
    "platforms/aliyun/",
    "platforms/aws/test_functions.py",
    "platforms/aws/test_hand_over.py",
    "platforms/aws/test_measure.py",
    "platforms/aws/test_server_functions.py",
    "cli/",
)
"""Slow tests that start functions, or wait for what happens in its own time."""

_COVERED_PROCESSES = (
    "e2e/test_like.py::test_limits_change_no_bit_of_the_result",
    "e2e/test_measure.py::test_a_model_is_profiled_in_functions",
    "e2e/test_recovery.py::test_functions_with_short_lives_hand_over",
    "e2e/test_recovery.py::test_killed_functions_are_replaced",
    "platforms/local/",
)
"""Tests of which coverage sees the processes that they start: whatever imports torch takes twice as long then."""


_COVERED_SLOW = ("chaos/", "cli/", "client/", "partitioner/test_mip.py", "platforms/", "profiler/", "training/")
"""Slow tests that coverage sees; the others run what quick ones reach already, and would take twice as long."""

_ALIKE = (
    "model/graph/test_lengths.py",
    "model/split/",
    "partitioner/",
    "runstate/interleaving/",
    "scheduler/",
    "test_imports.py",
    "test_known_mistakes.py",
    "worker/test_replicas_equal.py",
    "worker/test_synchronisation.py",
)
"""Quick tests whose cases run the same lines: coverage sees the first, as of slow tests with several cases."""

_COVERAGE = "COVERAGE_PROCESS_CONFIG"
"""What tells a new process to measure itself."""


@pytest.fixture(scope="session", autouse=True)
def logs_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of local functions and keys of runs do not go where those of the user lie; no history is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path_factory.mktemp("logs")))
        patch.setenv("FUNCPIPE_KEY_DIR", str(tmp_path_factory.mktemp("keys")))
        patch.setenv("FUNCPIPE_HISTORY", "")
        patch.setenv("FUNCPIPE_RUN_KEY", RUN_KEY.text)
        yield


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """What a test sets of the package's logger, as the command line does, is not set in the next one."""
    root = logging.getLogger("funcpipe")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def pytest_collection_finish() -> None:
    """What is loaded stays: the collector looks at what tests make only, and less often than every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that must not run side by side, and leave out of coverage what runs the same lines again.

    Slow tests of `_PROCESSES` run one after the other, on one worker of `pytest -n 2 --dist loadgroup`: two of them
    would have many more processes than this machine has processors. Of the faults of `chaos/` coverage sees each, as
    each goes its own way.
    """
    seen: set[str] = set()
    for item in items:
        slow, function = item.get_closest_marker("slow") is not None, _name(item).partition("[")[0]
        if slow and function.startswith(_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("processes"))
        again = function in seen and (slow or function.startswith(_ALIKE)) and not function.startswith("chaos/")
        if again or (slow and not function.startswith(_COVERED_SLOW)):
            item.add_marker("no_cover")
        seen.add(function)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide coverage from the processes that a test and its fixtures start, but for `_COVERED_PROCESSES`."""
    covered = _name(item).startswith(_COVERED_PROCESSES)
    hidden = None if covered else os.environ.pop(_COVERAGE, None)
    try:
        return (yield)
    finally:
        if hidden is not None:
            os.environ[_COVERAGE] = hidden


def _name(item: pytest.Item) -> str:
    """Such as `cli/test_cli.py::test_help`."""
    return f"{os.path.relpath(item.path, _TESTS)}::{item.name}"
