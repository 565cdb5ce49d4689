"""Groups of functions from start to end, and platforms that are busy and start functions later."""

from dataclasses import dataclass, field, replace

import pytest

from funcpipe.core import Invocation, ProbeSpec
from funcpipe.errors import PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.base import Handle, State, Status
from funcpipe.platforms.function_group import MAX_RESTARTS, START_WITHIN_S, FunctionGroup, Restarts, invoke_with_retry
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


@dataclass
class Scripted(Recording):
    """Says of functions what `said` holds by name, or else that they run; notes which it has stopped."""

    said: dict[str, Status | PlatformError] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    cannot_stop: set[str] = field(default_factory=set)

    def status(self, handle: Handle) -> Status:
        match self.said.get(handle.name):
            case PlatformError() as error:
                raise error
            case said:
                return said or super().status(handle)

    def stop(self, handle: Handle) -> None:
        if handle.name in self.cannot_stop:
            raise PlatformError("no answer either")
        self.stopped.append(handle.name)


def test_a_group_ends_what_may_run_when_it_is_left() -> None:
    clock, platform = Clock(), Scripted()
    with FunctionGroup(platform, clock=clock) as group:
        functions = [group.start(replace(WORKER, number=number)) for number in range(3)]
        clock.now_s += 5.0
        platform.said = {"function 1": Status(state=State.DONE), "function 2": PlatformError("no answer")}
        polled = [group.poll(function).state for function in functions]
        clock.now_s += 2.0
        assert [group.of(f"probe{number}") for number in range(3)] == [[function] for function in functions]
        assert (group.running, group.left) == (functions[2:], functions[2:])
        assert platform.stopped == ["function 2"]  # it may have run on, beside the one that takes its place
    assert polled == [State.DONE, State.FAILED, State.RUNNING]
    assert functions[1].status == Status(state=State.FAILED, reason="is not known any more: no answer")
    assert [function.watched_s() for function in functions] == [5.0, 5.0, 7.0]
    assert sorted(platform.stopped) == ["function 2", "function 3"]
    assert [group.runs(function.started) for function in functions] == [False, None, True]


def test_a_function_that_can_be_neither_asked_for_nor_stopped_counts_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, platform = Clock(), Scripted()
    with FunctionGroup(platform, clock=clock) as group:
        function = group.start(WORKER)
        platform.said, platform.cannot_stop = {"function 1": PlatformError("no answer")}, {"function 1"}
        clock.now_s += 5.0
        assert group.poll(function).state is State.FAILED
        assert (group.running, group.left) == ([], [function])
        clock.now_s += 2.0
        platform.cannot_stop = set()
    clock.now_s += 1.0
    assert (function.seconds(), platform.stopped) == (7.0, ["function 1"])
    text = "function function 1 of worker probe0 may still run and cost money"
    assert [message.partition(":")[0] for message in caplog.messages] == [text]


def test_a_restart_is_due_once_and_a_worker_is_given_up_after_a_few() -> None:
    restarts = Restarts()
    assert restarts.add("died") == 0.0
    restarts.due_s = 10.0
    assert [restarts.take_due(now_s) for now_s in (9.0, 10.0, 11.0)] == [False, True, False]
    for _ in range(MAX_RESTARTS - 1):
        restarts.add("died again")
    assert (restarts.are_exhausted, restarts.cause) == (False, "died again")
    restarts.add("died again")
    assert restarts.are_exhausted
