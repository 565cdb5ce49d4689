"""What is filed of a run: predicted beside observed seconds, and no failure where they cannot be filed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Bill, Event, Outcome, Plan, Quantity, Source, Trace, WorkerReport
from funcpipe.neighbours.history.filing import file_run, observed, place_of
from funcpipe.neighbours.history.journal import read_history
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.tasks import Kind
from tests.client.test_job_estimate import ITERATION
from tests.e2e import small

SPEC = load_spec("aws-lambda")


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
    report = WorkerReport(
        worker="s0.r0",
        attempt=0,
        outcome=Outcome.FINISHED,
        started_at_s=1000.0,
        ended_at_s=2000.0,
        puts=0,
        gets=0,
        empty_gets=0,
        sent_bytes=0,
        received_bytes=0,
        peak_memory_bytes=0,
    )
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


def prepared(plan: Plan) -> PreparedRun:
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
    file_run(prepared(plan), result())
    file_run(prepared(plan), result())
    assert read_history() == observed(plan, SPEC, result(), ran_on="local like aws-lambda")
    assert len(read_history()) == 4


def test_a_history_that_is_turned_off_or_cannot_be_written_is_no_failure(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file_run(prepared(plan), result())
    assert caplog.text == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "file" / "history.jsonl"))
    file_run(prepared(plan), result())
    assert "run mine is not in the history" in caplog.text
