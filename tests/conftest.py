import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

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
    "platforms/entry/",
    "worker/test_hand_over.py",
    "client/test_control.py",
    "platforms/aliyun/",
    "platforms/aws/test_functions.py",
    "platforms/aws/test_lives.py",
    "platforms/aws/test_measure.py",
    "cli/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests that start processes run one after the other, on one worker of `pytest -n 2 --dist loadgroup`.

    Two of them side by side would have more processes than this machine has processors.
    """
    for item in items:
        if item.get_closest_marker("slow") and os.path.relpath(item.path, _TESTS).startswith(_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("processes"))
