"""What is filed of comparisons and of runs by one of their ways."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Bill, Event, JobSpec, Plan, Quantity, Source, Trace
from funcpipe.core.provision import CostItem, Provision, ProvisionTable, Rented
from funcpipe.neighbours.history.filing import file_run, file_server_run, file_way_run, filed, observed, place_of
from funcpipe.neighbours.history.hindsight import hindsights
from funcpipe.neighbours.history.journal import read_all, read_history
from funcpipe.neighbours.parameter_server.training import ServerResult
from funcpipe.neighbours.parameter_server.worker_group import PushRecord, Updates
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.tasks import Kind
from tests.client.test_job_estimate import ITERATION
from tests.e2e import small
from tests.run_documents import REPORT

SPEC = load_spec("aws-lambda")
PLAN = replace(small.plan(2, 1), model="small", platform=SPEC.name)
JOB = JobSpec(samples=64, global_batch=4, epochs=2)


def provision(way: str, **fields: Any) -> Provision:
    usual: dict[str, Any] = {
        "rented": (Rented(name="m5.large", count=1),),
        "seconds": 1000.0,
        "iterations": 32.0,
        "binds": "price",
    }
    cost = (CostItem(name="m5.large", usd=1.0),)
    return Provision(way=way, why="", start_s=60.0, cost=cost, **(usual | fields))


OURS, SERVED = provision("funcpipe", plan=PLAN, seconds=900.0), provision("spotdnn")
TABLE = ProvisionTable(
    job=JOB,
    model="small",
    platform=SPEC.name,
    market="aws",
    provisions=(OURS, SERVED),
    refusals=(),
    recommended="funcpipe",
    why="",
)


@pytest.fixture(autouse=True)
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(path))
    return path


def prepared(**job: Any) -> PreparedRun:
    """Of a job of as many samples by our plan; an epoch has 16 steps."""
    usual = {"plan": PLAN, "samples": 64, "evaluation": None, "batches": SimpleNamespace(steps_per_epoch=16)}
    return cast(PreparedRun, SimpleNamespace(job=SimpleNamespace(**(usual | job)), resumed=None, running=None))


def took(steps: int) -> Any:
    """A run that ended 1000 s after its first line, 2 s after its invocation."""
    return replace(result(), losses=(1.0,) * steps, bill=replace(result().bill, compute_usd=0.75))


def test_a_run_by_the_plan_of_a_compared_way_is_filed_with_what_it_took() -> None:
    assert filed(TABLE) is TABLE
    filed(TABLE)
    file_way_run(prepared(), took(8), ran_on=SPEC.name)
    file_way_run(prepared(), took(8), ran_on=SPEC.name)
    found = read_all()
    (comparison,), (run,) = found.comparisons, found.way_runs  # both once
    assert (run.comparison, run.way, run.run, run.ran_on) == (comparison.key, "funcpipe", "mine", SPEC.name)
    assert (run.seconds, run.usd, run.share, run.with_start) == (1002.0, 0.75, 0.25, True)
    (looked_back,) = hindsights(found)
    assert looked_back.observed.seconds == pytest.approx(60 + 942 * 4)
    assert looked_back.best == "spotdnn"


def test_of_a_job_to_a_target_loss_steps_are_compared() -> None:
    filed(replace(TABLE, job=replace(JOB, epochs=None, target_loss=0.1)))
    file_way_run(prepared(), took(8), ran_on=SPEC.name)
    assert [run.share for run in read_all().way_runs] == [8 / 32]


def test_a_run_belongs_to_the_newest_comparison_with_its_plan() -> None:
    for deadline_s in (None, 5000.0):
        filed(replace(TABLE, job=replace(JOB, deadline_s=deadline_s)))
    file_way_run(prepared(), took(32), ran_on=SPEC.name)
    comparisons, (run,) = read_all().comparisons, read_all().way_runs
    assert run.comparison == comparisons[-1].key != comparisons[0].key


OTHERS = ({"samples": 65}, {"evaluation": object()}, {"plan": replace(PLAN, micro_batch=1)}, {"plan": small.plan(1, 1)})


@pytest.mark.parametrize("other", OTHERS)
def test_another_job_or_another_plan_is_not_filed(other: dict[str, Any]) -> None:
    filed(TABLE)
    file_way_run(prepared(**other), took(32), ran_on=SPEC.name)
    assert read_all().way_runs == ()


def test_a_run_that_was_resumed_is_not_filed() -> None:
    filed(TABLE)
    resumed = SimpleNamespace(job=prepared().job, resumed=object(), running=None)
    watched = SimpleNamespace(job=prepared().job, resumed=None, running=SimpleNamespace(generation=1))
    for again in (resumed, watched):
        file_way_run(cast(PreparedRun, again), took(32), ran_on=SPEC.name)
    assert read_all().way_runs == ()
    collected = SimpleNamespace(job=prepared().job, resumed=object(), running=SimpleNamespace(generation=0))
    file_way_run(cast(PreparedRun, collected), took(32), ran_on=SPEC.name)
    assert len(read_all().way_runs) == 1


def served(**fields: Any) -> ServerResult:
    return ServerResult(run="s", updates=Updates.BSP, seconds=470.0, state={}, **fields)


PUSH = PushRecord(worker="w", samples=4, loss=1.0, staleness=0, iterations=1.0, time_s=1.0)


@pytest.mark.parametrize("found", [served(losses=(1.0,) * 16), served(pushes=(PUSH,) * 16)])
def test_a_run_around_a_parameter_server_is_filed_without_the_start_of_its_machines(found: ServerResult) -> None:
    filed(TABLE)
    file_server_run(SERVED, found, prepared().job, ran_on="aws")
    (run,) = read_all().way_runs
    assert (run.way, run.ran_on, run.seconds, run.share, run.with_start) == ("spotdnn", "aws", 470.0, 0.5, False)
    (looked_back,) = hindsights(read_all())
    assert looked_back.observed.seconds == 60 + 2 * 470.0
    file_server_run(replace(SERVED, seconds=1.0), replace(found, run="t"), prepared().job, ran_on="aws")
    assert len(read_all().way_runs) == 1  # of no comparison


def test_a_history_that_is_off_or_cannot_be_written_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUNCPIPE_HISTORY", "")
    assert filed(TABLE) is TABLE
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "file" / "history.jsonl"))
    assert filed(TABLE) is TABLE
    assert "the comparison of ways is not in the history" in caplog.text


def test_a_comparison_in_which_no_way_does_the_job_is_not_filed() -> None:
    filed(replace(TABLE, provisions=(), recommended=None))
    assert read_all().comparisons == ()


def event(kind: Kind, step: int, start_s: float, end_s: float, stage: int = 0, waited_s: float = 0.0) -> Event:
    task = f"{kind.value}.s{stage}.r0.m0"
    return Event(
        task=task,
        stage=stage,
        replica=0,
        lane=kind.resource,
        step=step,
        start_s=start_s,
        end_s=end_s,
        waited_s=waited_s,
    )


def step_of(step: int, start_s: float) -> list[Event]:
    """4 s: a second of forward in each stage, a second of sending, a second of backward, and what is not counted."""
    return [
        event(Kind.FORWARD, step, start_s, start_s + 1),
        event(Kind.PUT_ACTIVATION, step, start_s + 1, start_s + 2),
        event(Kind.GET_ACTIVATION, step, start_s, start_s + 2.5, stage=1, waited_s=2.0),
        event(Kind.FORWARD, step, start_s + 2, start_s + 3, stage=1),
        event(Kind.BACKWARD, step, start_s + 3, start_s + 4, stage=1),
        event(Kind.UPDATE, step, start_s + 3, start_s + 3.5),
    ]


def result() -> RunResult:
    """Three steps, of which the last has fewer tasks, on two functions that started in 2 and 4 s."""
    report = replace(REPORT, started_at_s=1000.0, ended_at_s=2000.0)
    bill = Bill(
        platform=SPEC.name, functions=2, function_seconds=1.0, puts=0, lists=0, gets=0, compute_usd=0.0, request_usd=0.0
    )
    events = [*step_of(0, 0.0), *step_of(1, 4.0), event(Kind.FORWARD, 2, 8.0, 9.0)]
    return RunResult(
        run="mine",
        losses=(1.0,),
        tensors={},
        trace=Trace(run="mine", source=Source.EXECUTED, events=tuple(events)),
        bill=bill,
        workers=(report,),
        start_s={"s0.r0": 2.0, "s1.r0": 4.0},
    )


@pytest.fixture
def plan() -> Plan:
    """Two stages of one size, with an estimate of 0.3 s of computing and 0.4 s of messages for each micro-batch."""
    made = replace(small.plan(2, 1), model="small", platform=SPEC.name)
    return replace(made, estimate=replace(ITERATION, stages=ITERATION.stages[:2]))


def ended_by(plan: Plan) -> PreparedRun:
    platform = SimpleNamespace(url="local:///tmp/socket", spec=SPEC)
    job = SimpleNamespace(plan=plan, samples=64, evaluation=None)
    return cast(PreparedRun, SimpleNamespace(job=job, platform=platform, resumed=None, running=None))


def test_each_quantity_of_a_size_is_filed(plan: Plan) -> None:
    found = observed(plan, SPEC, result(), ran_on="local")
    assert {one.quantity: (one.predicted_s, one.observed_s) for one in found} == {
        Quantity.COMPUTE: (pytest.approx(2 * 0.3), pytest.approx(3 / 2)),
        Quantity.TRANSFER: (pytest.approx(2 * 0.4), pytest.approx(1.5 / 2)),
        Quantity.START_UP: (SPEC.cold_start_s, 3.0),
        Quantity.ITERATION: (10.0, 4.0),
    }
    assert {(one.run, one.platform, one.ran_on, one.size, one.model, one.at_s) for one in found} == {
        ("mine", "aws-lambda", "local", "1024MB", "small", 2000.0)
    }


def test_steps_with_a_meeting_are_filed_beside_what_was_expected_of_them(plan: Plan) -> None:
    """A step of 2 s without one, and one of 4 s with it: the mean of a round would be 3 s."""
    events = (event(Kind.FORWARD, 0, 0.0, 2.0), *step_of(1, 2.0))
    assert plan.estimate is not None
    local = replace(plan, estimate=replace(plan.estimate, iteration_s=3.0, meeting_s=3.9))
    met = replace(result(), trace=Trace(run="mine", source=Source.EXECUTED, events=events))
    found = observed(local, SPEC, met, ran_on="local")
    assert [(one.predicted_s, one.observed_s) for one in found if one.quantity is Quantity.ITERATION] == [(3.9, 4.0)]


def test_sizes_are_filed_apart(plan: Plan) -> None:
    stages = (plan.stages[0], replace(plan.stages[1], size="2048MB", memory_mb=2048))
    found = observed(replace(plan, stages=stages), SPEC, result(), ran_on="local")
    seconds = {(one.size, one.quantity): one.observed_s for one in found}
    assert seconds["1024MB", Quantity.COMPUTE] == pytest.approx(1)
    assert seconds["2048MB", Quantity.COMPUTE] == pytest.approx(2)
    assert seconds["2048MB", Quantity.START_UP] == 4.0
    assert seconds["1024MB+2048MB", Quantity.ITERATION] == 4.0


def test_nothing_is_filed_without_a_prediction_or_a_step(plan: Plan) -> None:
    assert observed(replace(plan, estimate=None), SPEC, result(), ran_on="local") == ()
    for events in ((), (event(Kind.LOAD, 0, 0.0, 1.0),)):
        nothing = replace(result(), trace=Trace(run="mine", source=Source.EXECUTED, events=events))
        assert observed(plan, SPEC, nothing, ran_on="local") == ()


def test_a_place_says_whose_limits_local_functions_have() -> None:
    assert place_of("local:///tmp/socket", load_spec("local")) == "local"
    assert place_of("local:///tmp/socket", SPEC) == "local like aws-lambda"
    assert place_of("aws-lambda://funcpipe?region=us-east-1", SPEC) == "aws-lambda"


def test_a_run_is_filed_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "history.jsonl"))
    file_run(ended_by(plan), result())
    file_run(ended_by(plan), result())
    assert read_history() == observed(plan, SPEC, result(), ran_on="local like aws-lambda")
    assert len(read_history()) == 4


def test_a_history_that_is_turned_off_or_cannot_be_written_is_no_failure(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file_run(ended_by(plan), result())
    assert caplog.text == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "file" / "history.jsonl"))
    file_run(ended_by(plan), result())
    assert "run mine is not in the history" in caplog.text
