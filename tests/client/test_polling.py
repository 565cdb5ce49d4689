"""How often a client asks for the next step, by a clock that goes on only when the client pauses."""

import pytest

from funcpipe.client.follow.steps import StepPolls, await_step
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, StepReport
from funcpipe.errors import DeadlineExceeded
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.owner import owned
from funcpipe.runstate.reports import StepReader
from tests.client.scripted import KEYS, Run
from tests.client.threads import job

HOUR_S = 3600.0


class Clock:
    """A time that passes only in pauses, of which `pauses` were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses = 0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.1  # functions are looked after no more rarely
        self.now_s += seconds
        self.pauses += 1


def asked_in_an_hour(step_s: float, *, heartbeat_s: float = 10.0) -> tuple[int, float]:
    """How often a client asks in an hour of steps of `step_s`, and how late it saw their ends at most."""
    clock, asked, late_s, ended_s = Clock(), 0, 0.0, 0.0
    polls = StepPolls(heartbeat_s, clock=clock, sleep=clock.sleep)

    def find() -> bool | None:
        nonlocal asked
        asked += 1
        return True if clock.now_s >= ended_s else None

    steps = 0
    while clock.now_s < HOUR_S:
        ended_s += step_s
        _, waited = polls.until(find, lambda: None)
        polls.step_ended(waited=waited)
        steps += 1
        if steps > 3:  # by then it is known how long steps take
            late_s = max(late_s, clock.now_s - ended_s)
    return asked, late_s


@pytest.mark.parametrize(("step_s", "asked", "late_s"), [(0.5, 36_000, 0.5), (10.0, 1500, 5.0), (60.0, 900, 5.0)])
def test_a_client_asks_a_few_times_a_step_and_no_more(step_s: float, asked: int, late_s: float) -> None:
    found, late = asked_in_an_hour(step_s)
    assert HOUR_S / step_s <= found <= asked
    assert late <= late_s + 1e-6


def test_a_client_that_knows_nothing_asks_soon_and_then_less_and_less() -> None:
    clock = Clock()
    polls = StepPolls(10.0, clock=clock, sleep=clock.sleep)
    assert [polls.pause_s(waited_s) for waited_s in (0.0, 0.2, 1.0, 8.0, 60.0)] == [0.05, 0.05, 0.25, 2.0, 5.0]
    assert StepPolls(0.5).pause_s(60.0) == 0.5  # and no less often than heartbeats come


def test_steps_that_ended_while_the_client_was_away_say_nothing_of_how_long_they_take() -> None:
    clock = Clock()
    polls = StepPolls(10.0, clock=clock, sleep=clock.sleep)
    for _ in range(100):
        polls.step_ended(waited=False)
    assert polls.step_s == 0.0
    polls.step_ended(waited=True)
    clock.now_s = 12.0
    for waited in (False, False, True):
        polls.step_ended(waited=waited)
    assert polls.step_s == 4.0


def test_a_quiet_run_costs_few_requests(traced: None) -> None:
    run = Run(faults=FaultTolerance())
    with run.start() as supervisor:
        session = session_on(Site(run.platform, run.storage, "memory://"))
        ready = prepare(job(), session, faults=FaultTolerance(start_s=HOUR_S - job().message_deadline_s))
        clock, before = Clock(), ready.meter.counts
        polls = StepPolls(ready.faults.heartbeat_s, clock=clock, sleep=clock.sleep)
        reader = StepReader(ready.storage, KEYS)
        with owned(run.storage, KEYS.run) as owner:
            with pytest.raises(DeadlineExceeded):
                await_step(ready, reader, supervisor, 0, owner, polls)
            asked = ready.meter.counts
            assert asked.gets - before.gets < 800  # every 50 ms it was 72,000
            assert asked.lists - before.lists < 60
            for replica in range(2):
                report = StepReport(step=0, samples=4, loss_sum=1.0)
                put_document(ready.storage, KEYS.step_report(0, f"s2.r{replica}"), report)
            reports, waited = await_step(ready, reader, supervisor, 0, owner, polls)
        assert (len(reports), waited) == (2, False)
