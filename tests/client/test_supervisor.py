"""What the client does about functions that die or are silent."""

import contextlib
from dataclasses import replace

import pytest

from funcpipe.client.follow.results import bill
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.core import (
    CountsByKind,
    FaultTolerance,
    Halt,
    Outcome,
    RunAccount,
    WorkerSpec,
)
from funcpipe.core.backoff import Backoff
from funcpipe.errors import DeadlineExceeded, PlatformError, RunHalted, WorkerFailed
from funcpipe.platforms.base import Handle, State, Status
from funcpipe.platforms.function_group import Restarts
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.functions import start_function
from funcpipe.runstate.generations import load_worker_specs
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.reader import worker_reports
from tests.client.scripted import KEYS, Run, Scripted, spec_with

DONE, FAILED = Status(state=State.DONE), Status(state=State.FAILED, reason="killed by SIGKILL")


def test_a_worker_that_dies_is_restarted_with_what_the_run_has_cost(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(account=RunAccount(spent_usd=2.0, elapsed_s=50.0))
    supervisor = run.start()
    run.beat("s1.r0", step_s=7.0)
    run.platform.ended["s0.r0-0"] = FAILED
    with caplog.at_level("WARNING"):
        assert supervisor.poll() == 6
    again = run.platform.invoked[-1]
    assert again.worker == "s0.r0"
    assert again.account.spent_usd >= 2.0
    assert again.account.elapsed_s >= 50.0
    assert again.account.step_s == 7.0
    said = "run run-1: restarts worker s0.r0 as attempt 0: it (s0.r0-0) ended without a report: killed by SIGKILL"
    assert said in caplog.messages


def restarts_pause(patch: pytest.MonkeyPatch, pause_s: float) -> None:
    pauses = Backoff(first_s=1.0, most_s=1e6, draw=lambda: pause_s)
    patch.setattr("funcpipe.platforms.function_group.RESTART_PAUSES", pauses)


def test_a_worker_that_dies_again_is_restarted_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    supervisor = run.start()
    restarts_pause(monkeypatch, 3600.0)
    run.platform.ended["s0.r0-0"] = FAILED
    for _ in range(3):
        assert supervisor.poll() == 6
    assert len(run.platform.invoked) == 7  # the first restart came at once, the second comes in an hour
    supervisor.step_ended()
    run.platform.ended["s2.r1-0"] = FAILED
    supervisor.poll()
    assert run.platform.invoked[-1].worker == "s2.r1"  # others are looked after meanwhile
    assert len(run.platform.invoked) == 8


def test_pauses_grow_from_restart_to_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts_pause(monkeypatch, 1.0)
    restarts = Restarts()
    assert [restarts.add("died") for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]


def test_a_worker_that_dies_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts_pause(monkeypatch, 0.0)
    run = Run()
    supervisor = run.start()
    run.platform.ended["s0.r0-0"] = FAILED
    for _ in range(5):
        supervisor.poll()
    with pytest.raises(WorkerFailed, match=r"worker s0\.r0 .* 6 times without a step in between"):
        supervisor.poll()


def test_a_worker_whose_restart_the_platform_fails_to_start_is_restarted_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restarts_pause(monkeypatch, 0.0)
    run = Run()
    supervisor = run.start()
    run.platform.ended["s0.r0-0"] = FAILED
    run.platform.busy = 2
    assert supervisor.poll() == 6
    assert (len(run.platform.invoked), run.platform.busy) == (7, 0)
    assert "as attempt 0: it cannot be started: nobody answers" in caplog.text
    run.platform.busy = 10
    with pytest.raises(WorkerFailed, match=r"worker s0\.r0 cannot be started: nobody answers, 6 times without a step"):
        supervisor.poll()


def test_a_step_in_between_lets_a_worker_be_restarted_again() -> None:
    run = Run()
    supervisor = run.start()
    run.platform.ended["s0.r0-0"] = FAILED
    for _ in range(10):
        supervisor.poll()
        supervisor.step_ended()


def test_a_successor_is_watched_in_place_of_the_function_that_handed_over() -> None:
    run = Run()
    supervisor = run.start()
    told = get_document(run.storage, WorkerSpec, KEYS.payload("s0.r0"))
    start_function(run.platform, run.storage, KEYS, replace(told, attempt=1))
    run.platform.ended["s0.r0-0"] = DONE
    run.report("s0.r0", Outcome.HANDED_OVER)
    assert supervisor.poll() == 6
    assert len(run.platform.invoked) == 7  # nothing was restarted
    run.platform.ended["s0.r0-1"] = DONE
    run.report("s0.r0", Outcome.FINISHED, attempt=1)
    assert supervisor.poll() == 5


def cut_short(run: Run, key: str) -> None:
    """What is left of an object of which the put was cut short."""
    data = run.objects.get(key)
    run.objects.put(key, data[: len(data) // 2])


@pytest.mark.parametrize("outcome", [Outcome.HANDED_OVER, Outcome.FAILED])
def test_a_report_of_an_ended_function_that_was_cut_short_lets_its_worker_be_restarted(outcome: Outcome) -> None:
    run = Run()
    supervisor = run.start()
    run.report("s0.r0", Outcome.HANDED_OVER)
    cut_short(run, KEYS.worker_report("s0.r0", 0))
    run.platform.ended["s0.r0-0"] = DONE if outcome is Outcome.HANDED_OVER else FAILED
    assert supervisor.poll() == 6
    again = run.platform.invoked[-1]
    assert (again.worker, again.attempt) == ("s0.r0", 1)


def test_a_final_failure_of_which_the_report_was_cut_short_is_told_by_the_order_to_end() -> None:
    run = Run()
    supervisor = run.start()
    run.report("s2.r0", Outcome.FAILED, error="ValueError: wrong")
    cut_short(run, KEYS.worker_report("s2.r0", 0))
    put_document(run.storage, KEYS.halt, Halt(reason="worker s2.r0 failed: ValueError: wrong"))
    run.platform.ended["s2.r0-0"] = FAILED
    with pytest.raises(WorkerFailed, match=r"run run-1: worker s2\.r0 failed: ValueError: wrong"):
        supervisor.poll()


def test_a_function_that_had_lost_its_lease_is_said_to_have(caplog: pytest.LogCaptureFixture) -> None:
    """It ends with exit code 0 and without a report, as does one in which os._exit() was called."""
    run = Run()
    supervisor = run.start()
    Lease(run.storage, KEYS, "s0.r0", 2, fresh_s=1.0).take()  # of a function that has died, too
    run.platform.ended["s0.r0-0"] = DONE
    assert supervisor.poll() == 6
    assert run.platform.invoked[-1].attempt == 3
    assert "it (s0.r0-0) ended without a report, as attempt 2 had taken its lease" in caplog.text


def test_what_a_successor_took_beside_its_predecessor_is_in_the_cost() -> None:
    """It is known only from when it takes over, but is billed from its start, and so counts for the limit."""
    run = Run()
    supervisor = run.start()
    told = get_document(run.storage, WorkerSpec, KEYS.payload("s0.r0"))
    start_function(run.platform, run.storage, KEYS, replace(told, attempt=1))
    run.platform.ended["s0.r0-0"] = DONE
    run.report("s0.r0", Outcome.HANDED_OVER)
    run.beat("s0.r0", attempt=1, alive_s=1000.0)
    supervisor.poll()
    assert supervisor.cost_usd() == pytest.approx(1000.0 * 1024e-8, rel=0.02)


def test_the_cost_of_requests_has_the_invocations() -> None:
    run = Run()
    dear = replace(spec_with(), price_invocation_usd=1.0, price_put_usd=0.0, price_get_usd=0.0)
    supervisor = Supervisor(run.platform, run.storage, KEYS, prices=dear, account=run.account)
    run.start(supervisor)
    assert supervisor.requests_usd() == 6.0


def test_a_function_that_is_never_heard_of_is_replaced() -> None:
    run = Run(faults=FaultTolerance(heartbeat_s=1e-9, start_s=1e-9, lease_s=1e-9))
    supervisor = run.start()
    run.beat("s0.r0")
    supervisor.poll()
    assert [spec.worker for spec in run.platform.invoked[6:]] == [f"s{s}.r{r}" for s in range(3) for r in range(2)][1:]


def test_a_platform_that_does_not_know_a_function_any_more_has_lost_it() -> None:
    class Forgetful(Scripted):
        def status(self, handle: Handle) -> Status:
            if handle.name == "s0.r0-0":
                raise PlatformError("never heard of it")
            return super().status(handle)

    run = Run(platform=Forgetful())
    supervisor = run.start()
    supervisor.poll()
    assert run.platform.invoked[-1].worker == "s0.r0"


def test_a_function_that_the_platform_lost_for_a_moment_is_watched_and_paid_for_again() -> None:
    class Stammering(Scripted):
        asked = 0

        def status(self, handle: Handle) -> Status:
            self.asked += handle.name == "s0.r0-0"
            if self.asked == 1:
                self.asked += 1
                raise PlatformError("no answer")
            return super().status(handle)

    run = Run(platform=Stammering())
    supervisor = run.start()
    assert supervisor.poll() == 6
    assert len(run.platform.invoked) == 6
    assert [function.ended_s for function in supervisor.functions()] == [None] * 6


def test_a_failure_that_a_restart_would_not_mend_ends_the_run_with_the_first_cause() -> None:
    run = Run()
    supervisor = run.start()
    run.report("s1.r0", Outcome.FAILED, error="DeadlineExceeded: nothing came")
    run.report("s2.r0", Outcome.FAILED, error="ValueError: wrong")
    run.platform.ended |= {"s1.r0-0": FAILED, "s2.r0-0": FAILED}
    with pytest.raises(WorkerFailed, match=r"worker s2\.r0 failed outside its tasks: ValueError: wrong"):
        supervisor.poll()


def test_a_run_that_was_halted_says_why() -> None:
    run = Run()
    supervisor = run.start()
    put_document(run.storage, KEYS.halt, Halt(reason="enough", step=3))
    for spec in run.platform.invoked:
        run.platform.ended[f"{spec.worker}-0"] = DONE
        run.report(spec.worker, Outcome.HALTED)
    with pytest.raises(RunHalted, match="run run-1 was ended: enough"):
        supervisor.poll()


def test_a_failure_behind_a_halt_is_told_in_its_place() -> None:
    run = Run()
    supervisor = run.start()
    run.platform.ended["s0.r0-0"] = DONE
    run.report("s0.r0", Outcome.HALTED)
    run.report("s2.r1", Outcome.FAILED, error="ValueError: wrong")
    with pytest.raises(WorkerFailed, match="ValueError: wrong"):
        supervisor.poll()


def test_functions_that_outlive_the_last_step_are_told() -> None:
    supervisor = Run().start()
    with pytest.raises(DeadlineExceeded, match=r"run run-1: 6 functions still run 0\.01 s after the last step"):
        supervisor.wait(0.01)


def test_leaving_ends_every_function_unless_the_run_was_left_to_itself() -> None:
    run = Run()
    with run.start():
        pass
    assert len(run.platform.stopped) == 6
    other = Run()
    with other.start() as supervisor:
        supervisor.detach()
    assert other.platform.stopped == set()


@pytest.mark.parametrize(("error", "stopped"), [(KeyboardInterrupt(), 0), (OSError(), 0), (WorkerFailed(), 6)])
def test_a_client_that_only_watches_ends_functions_only_with_the_run(error: BaseException, stopped: int) -> None:
    run = Run()
    run.start()
    with contextlib.suppress(type(error)), run.supervisor() as supervisor:
        supervisor.attach(load_worker_specs(run.storage, KEYS))
        raise error
    assert len(run.platform.stopped) == stopped


def test_a_client_that_attaches_counts_what_was_spent_before() -> None:
    run = Run(account=RunAccount(spent_usd=0.5, elapsed_s=60.0))
    run.start()
    run.beat("s0.r0")
    run.platform.ended |= {"s1.r0-0": FAILED}
    supervisor = run.supervisor()
    supervisor.attach(load_worker_specs(run.storage, KEYS))
    assert 0.5 <= supervisor.cost_usd() < 0.51
    assert 60.0 <= supervisor.elapsed_s() < 120.0
    seconds = {function.started.worker: function.seconds() for function in supervisor.functions()}
    assert seconds["s0.r0"] >= 40.0  # as its heartbeat said
    assert seconds["s1.r0"] == 0.0  # nobody knows
    run.report("s1.r0", Outcome.FAILED)
    reports = worker_reports(run.storage, KEYS)
    made = bill(supervisor.functions(), reports, CountsByKind(), spec_with(), earlier_usd=0.25)
    assert made.functions == 6
    assert made.function_seconds >= 47.0
    assert made.cost_usd == pytest.approx(0.25 + made.compute_usd + made.request_usd)


def test_a_function_that_may_run_counts_for_a_client_that_attaches_until_it_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.start()
    run.platform.unknown, supervisor = {"s1.r0-0"}, run.supervisor()
    supervisor.attach(load_worker_specs(run.storage, KEYS))
    (function,) = [function for function in supervisor.functions() if function.started.worker == "s1.r0"]
    assert (function.ended_s, function.is_unknown) == (None, True)
    said = "function s1.r0-0 of worker s1.r0 may still run, as its platform cannot say: nobody answers"
    assert caplog.messages.count(said) == 1
    run.platform.unknown = set()
    assert supervisor.poll() == 6
    assert function.runs  # as it did all the time: it was not started again, and its seconds count
    assert run.platform.stopped == set()


@pytest.mark.parametrize(("keep", "error", "left"), [(True, None, 0), (True, "failed", 6), (False, "failed", 0)])
def test_who_starts_a_function_of_a_run_that_is_to_be_deleted_can_see_that(
    keep: bool, error: str | None, left: int
) -> None:
    run = Run()
    with contextlib.suppress(WorkerFailed), run.supervisor(keep=keep) as supervisor:
        run.start(supervisor)
        if error:
            raise WorkerFailed(error)
    assert len(run.platform.stopped) == 6
    assert len(run.storage.list(KEYS.payloads)) == left
