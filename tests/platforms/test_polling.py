"""Functions count as running while a busy cloud cannot tell."""

import pytest

from funcpipe.errors import PlatformBusy, PlatformError
from funcpipe.platforms.shared.cloud import BUSY_FOR_S, OutageTolerance, Polling
from tests.platforms.clock import Clock


def polling_by(clock: Clock) -> Polling:
    return Polling(every_s=1.0, clock=clock, sleep=clock.sleep)


def test_functions_that_nobody_can_tell_of_for_a_while_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outages = OutageTolerance(polling_by(clock))

    def busy() -> None:
        raise PlatformBusy("too many requests")

    for _ in range(3):
        outages.ask(busy)
        clock.now_s += BUSY_FOR_S / 3 - 1
    assert len(caplog.messages) == 1
    outages.ask(lambda: None)
    clock.now_s += BUSY_FOR_S
    outages.ask(busy)
    clock.now_s += BUSY_FOR_S
    with pytest.raises(PlatformBusy, match="too many requests"):
        outages.ask(busy)


def test_a_function_that_the_cloud_does_not_know_is_told_at_once() -> None:
    def unknown() -> None:
        raise PlatformError("no such task")

    with pytest.raises(PlatformError, match="no such task"):
        OutageTolerance(polling_by(Clock())).ask(unknown)
