import os
import sys

import pytest

from funcpipe.platforms.process import usable_processors


def test_a_process_that_is_bound_to_some_processors_uses_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert usable_processors() == 3


@pytest.mark.parametrize(("count", "usable"), [(8, 8), (None, 1)])
def test_elsewhere_it_uses_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, count: int | None, usable: int
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_processors() == usable
