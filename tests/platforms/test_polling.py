"""Clouds that are busy: functions are started later, and count as running while nobody can tell."""

from dataclasses import dataclass, field

import pytest

from funcpipe.errors import PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.shared.polling import BUSY_FOR_S, START_WITHIN_S, OutageTolerance, Polling


@dataclass
class Clock:
    """A clock that only pauses move."""

    now_s: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def polling(self) -> Polling:
        return Polling(every_s=1.0, clock=self, sleep=self.sleep)


@dataclass
class Cloud:
    """Answers with errors, as long as there are any."""

    errors: list[Exception]
    asked: int = 0

    def __call__(self) -> str:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return "started"


def test_a_function_is_started_once_the_cloud_is_no_longer_busy(caplog: pytest.LogCaptureFixture) -> None:
    clock, cloud = Clock(), Cloud([PlatformBusy("no room"), PlatformBusy("no room")])
    assert clock.polling().start("worker s0.r0", cloud) == "started"
    assert len(clock.pauses) == 2
    assert all(pause_s > 0 for pause_s in clock.pauses)
    assert [message.partition(" for now")[0] for message in caplog.messages] == 2 * ["worker s0.r0 cannot be started"]
    assert "no room" in caplog.messages[0]


def test_a_cloud_that_stays_busy_is_given_up() -> None:
    clock, cloud = Clock(), Cloud([PlatformBusy("no room")] * 10_000)
    with pytest.raises(PlatformBusy, match="no room"):
        clock.polling().start("worker s0.r0", cloud)
    assert START_WITHIN_S <= clock.now_s - 1000.0 <= START_WITHIN_S + 20.0


@pytest.mark.parametrize("error", [PlatformRefused("no such function"), PlatformError("who knows")])
def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    clock, cloud = Clock(), Cloud([error])
    with pytest.raises(type(error)):
        clock.polling().start("worker s0.r0", cloud)
    assert (cloud.asked, clock.pauses) == (1, [])


def test_functions_that_nobody_can_tell_of_for_a_while_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outages = OutageTolerance(clock.polling())

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
        OutageTolerance(Clock().polling()).ask(unknown)
