"""Who of a run is alive, by reports, heartbeats and the platform; clocks are given, nobody waits."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from funcpipe.core import LeaseDocument, Outcome
from funcpipe.core.run import WorkerSpec
from funcpipe.errors import PlatformError
from funcpipe.platforms import function_group
from funcpipe.platforms.base import Handle, Platform, State, Status
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import start_function
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import RunLiveness, WorkerState, find_liveness
from funcpipe.testing.memory_storage import MemoryStorage
from tests.recording import Recording
from tests.run_documents import BEAT, PLAN, RECORD, REPORT

KEYS = Keys("run-1")
FAILED = Status(state=State.FAILED, reason="killed by SIGKILL")


@dataclass
class Told(Recording):
    """A platform that is told what to say of functions, by name; the others run."""

    said: dict[str, Status] = field(default_factory=dict)
    knows: bool = True

    def status(self, handle: Handle) -> Status:
        if not self.knows:
            raise PlatformError("there is no host any more")
        return self.said.get(handle.name, Status(state=State.RUNNING))


class Run:
    """A run of two workers, which tests write the traces of."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.platform = Told()
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def start(self, stage: int, attempt: int = 0) -> None:
        spec = WorkerSpec(
            run="run-1",
            attempt=attempt,
            stage=stage,
            replica=0,
            plan=PLAN,
            storage="memory://",
            platform="recording://here",
            bundle="b",
            bundle_sha256="x",
            parameters="p",
            epochs=1,
            seed=0,
            message_deadline_s=300.0,
        )
        put_document(self.storage, KEYS.payload(spec.worker), spec)
        start_function(self.platform, self.storage, KEYS, spec)

    def beat(self, worker: str, **changes: float) -> None:
        beat = replace(BEAT, worker=worker, **changes)  # type: ignore[arg-type]
        put_document(self.storage, KEYS.heartbeat(worker, beat.attempt), beat)

    def report(self, worker: str, outcome: Outcome, *, attempt: int = 0, retryable: bool = False) -> None:
        report = replace(
            REPORT,
            worker=worker,
            attempt=attempt,
            outcome=outcome,
            started_at_s=900.0,
            ended_at_s=1001.0,
            puts=1,
            gets=1,
            peak_memory_bytes=1,
            retryable=retryable,
        )
        put_document(self.storage, KEYS.worker_report(worker, attempt), report)
        if report.is_final:
            ended = LeaseDocument(holder="it", ended=outcome)
            put_document(self.storage, KEYS.lease(worker, attempt + 1), ended)

    def look(self, now_s: float, *, asked: bool = True) -> RunLiveness:
        def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            self.meanwhile()

        def open_platform(url: str) -> Platform:
            return self.platform.open(url)

        return find_liveness(self.storage, RECORD, open_platform if asked else None, clock=lambda: now_s, pause=pause)


@pytest.fixture
def run() -> Run:
    made = Run()
    for stage in range(2):
        made.start(stage)
        made.beat(f"s{stage}.r0")
    return made


def states(life: RunLiveness) -> list[WorkerState]:
    return [worker.state for worker in life.workers]


def test_workers_whose_functions_run_and_beat_are_at_work_at_one_look(run: Run) -> None:
    life = run.look(1005.0)
    assert states(life) == [WorkerState.WORKING] * 2
    assert (life.is_dead, life.last_seen_at_s, run.pauses) == (False, 1000.0, [])


def test_a_run_is_dead_as_soon_as_the_platform_knows_that_all_functions_have_ended(run: Run) -> None:
    run.platform.said = {"function 1": FAILED, "function 2": Status(state=State.DONE)}
    life = run.look(1001.0)
    assert (life.is_dead, states(life), run.pauses) == (True, [WorkerState.DEAD] * 2, [])
    assert life.workers[0].reason == "killed by SIGKILL"


def test_a_worker_that_others_will_restart_does_not_make_the_run_dead(run: Run) -> None:
    run.platform.said = {"function 1": FAILED}
    life = run.look(1001.0)
    assert not life.is_dead
    assert [worker.worker for worker in life.lost] == ["s0.r0"]


@pytest.mark.parametrize("now_s", [1001.0, 5000.0, -3000.0])
def test_without_the_platform_only_a_second_heartbeat_proves_life_whatever_the_clocks_say(
    run: Run, now_s: float
) -> None:
    run.platform.knows = False
    life = run.look(now_s)
    assert states(life) == [WorkerState.SILENT] * 2
    assert life.is_dead
    assert sum(run.pauses) >= 20.0
    run.pauses.clear()

    def both_beat() -> None:
        for worker in ("s0.r0", "s1.r0"):
            run.beat(worker, beat=2)

    run.meanwhile = both_beat
    life = run.look(now_s)
    assert states(life) == [WorkerState.WORKING] * 2
    assert len(run.pauses) == 1  # it waits no longer than it must


def test_a_function_that_runs_but_says_nothing_is_silent(run: Run) -> None:
    run.meanwhile = lambda: run.beat("s1.r0", beat=2)
    life = run.look(2000.0)
    assert states(life) == [WorkerState.SILENT, WorkerState.WORKING]
    assert not life.is_dead


def test_a_function_that_was_just_started_is_starting_until_it_had_time_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, now_s = Run(), 5000.0
    monkeypatch.setattr(function_group, "time", SimpleNamespace(time=lambda: now_s))
    run.start(0)
    run.start(1)
    assert states(run.look(now_s + 1)) == [WorkerState.STARTING] * 2
    assert states(run.look(now_s + 100)) == [WorkerState.SILENT] * 2


def test_a_successor_that_waits_does_not_hide_the_function_that_still_works(run: Run) -> None:
    run.start(0, attempt=1)
    assert states(run.look(1005.0)) == [WorkerState.WORKING] * 2
    run.report("s0.r0", Outcome.FINISHED)  # which then has nothing to do
    assert states(run.look(1005.0)) == [WorkerState.FINISHED, WorkerState.WORKING]


@pytest.mark.parametrize(
    ("outcome", "retryable", "state"),
    [
        (Outcome.FINISHED, False, WorkerState.FINISHED),
        (Outcome.HALTED, False, WorkerState.HALTED),
        (Outcome.FAILED, False, WorkerState.FAILED),
        (Outcome.FAILED, True, WorkerState.DEAD),
    ],
)
def test_a_report_says_how_a_worker_ended(run: Run, outcome: Outcome, retryable: bool, state: WorkerState) -> None:
    for worker in ("s0.r0", "s1.r0"):
        run.report(worker, outcome, retryable=retryable)
    life = run.look(1005.0)
    assert states(life) == [state] * 2
    assert life.is_dead == retryable
    assert life.ended(state)
    assert life.last_seen_at_s == 1001.0


def test_the_report_of_an_attempt_that_was_followed_by_another_says_nothing(run: Run) -> None:
    run.report("s0.r0", Outcome.FAILED, retryable=True)
    run.start(0, attempt=1)
    run.beat("s0.r0", attempt=1)
    assert states(run.look(1005.0)) == [WorkerState.WORKING] * 2


def test_functions_that_nobody_recorded_are_judged_by_what_they_send() -> None:
    run = Run()
    run.beat("s0.r0")
    assert states(run.look(1005.0)) == [WorkerState.SILENT] * 2
