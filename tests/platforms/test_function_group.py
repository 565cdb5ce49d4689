"""A platform that is busy starts functions later."""

from dataclasses import dataclass, field

import pytest

from funcpipe.core import Invocation, ProbeSpec
from funcpipe.errors import PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.base import Handle
from funcpipe.platforms.function_group import START_WITHIN_S, invoke_with_retry
from tests.platforms.clock import Clock
from tests.recording import Recording

WORKER = ProbeSpec(
    run="run-1", number=0, size="small", memory_mb=512, storage="memory://", platform="recording://here", time_s=1.0
)


@dataclass
class Failing(Recording):
    """Fails to start functions, as long as there are errors."""

    errors: list[Exception] = field(default_factory=list)

    def invoke(self, worker: Invocation) -> Handle:
        if self.errors:
            raise self.errors.pop(0)
        return super().invoke(worker)


def started(platform: Failing, clock: Clock) -> Handle:
    return invoke_with_retry(platform, WORKER, clock=clock, sleep=clock.sleep)


def test_a_function_is_started_once_the_platform_is_no_longer_busy(caplog: pytest.LogCaptureFixture) -> None:
    clock, platform = Clock(), Failing(errors=[PlatformBusy("no room"), PlatformBusy("no room")])
    assert started(platform, clock).name == "function 1"
    assert len(clock.pauses) == 2
    assert all(pause_s > 0 for pause_s in clock.pauses)
    assert [message.partition(" for now")[0] for message in caplog.messages] == 2 * ["worker probe0 cannot be started"]
    assert "no room" in caplog.messages[0]


def test_a_platform_that_stays_busy_is_given_up() -> None:
    clock, platform = Clock(), Failing(errors=[PlatformBusy("no room")] * 10_000)
    with pytest.raises(PlatformBusy, match="no room"):
        started(platform, clock)
    assert START_WITHIN_S <= clock.now_s - 1000.0 <= START_WITHIN_S + 20.0


@pytest.mark.parametrize("error", [PlatformRefused("no such function"), PlatformError("who knows")])
def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    clock, platform = Clock(), Failing(errors=[error])
    with pytest.raises(type(error)):
        started(platform, clock)
    assert (platform.errors, platform.invoked, clock.pauses) == ([], [], [])
