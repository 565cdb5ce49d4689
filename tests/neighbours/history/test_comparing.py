"""What is filed of comparisons and of runs by one of their ways."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import JobSpec
from funcpipe.core.provision import CostItem, Provision, ProvisionTable, Rented
from funcpipe.neighbours.history.filing import file_server_run, file_way_run, filed
from funcpipe.neighbours.history.hindsight import hindsights
from funcpipe.neighbours.history.journal import read_all
from funcpipe.neighbours.parameter_server.training import ServerResult
from funcpipe.neighbours.parameter_server.worker_group import PushRecord, Updates
from tests.e2e import small
from tests.neighbours.history.test_observing import SPEC, result

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
