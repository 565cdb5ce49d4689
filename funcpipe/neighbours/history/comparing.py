"""Records of compared ways to do a job, and of runs by one of them, in the local history.

A run belongs to the newest comparison that has a way with its plan, or with the machines that it trains on, for as many
samples. Errors are warnings, and fail nothing else.
"""

import time
from typing import TYPE_CHECKING

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Plan
from funcpipe.core.history import ComparedWay, Comparison, WayRun
from funcpipe.core.provision import Provision, ProvisionTable
from funcpipe.neighbours.history.journal import Entry, append, filing, history_file, read_all

if TYPE_CHECKING:
    from funcpipe.neighbours.parameter_server.server_run import ServerResult


def filed(table: ProvisionTable) -> ProvisionTable:
    """`table`, which is now in the history, if any of its ways can do the job."""
    from funcpipe.neighbours.history.hindsight import comparison_of

    if table.provisions:
        _file("the comparison of ways", comparison_of(table, at_s=time.time()))
    return table


def file_way_run(prepared: PreparedRun, result: RunResult, *, ran_on: str) -> None:
    """File a run of functions by the plan of a compared way.

    One that was resumed, or validated the model meanwhile, took longer than the job that was compared, and is left out.
    """
    job, workers, running = prepared.job, result.workers, prepared.running
    was_resumed = prepared.resumed is not None if running is None else running.generation > 0
    if not (result.losses and workers) or job.evaluation is not None or was_resumed:
        return
    found = _compared(job.plan, job.samples)
    if found is None:
        return
    comparison, way = found
    began_at_s = min(report.started_at_s - result.start_s.get(report.worker, 0.0) for report in workers)
    ended_at_s = max(report.ended_at_s for report in workers)
    took = WayRun(
        comparison=comparison.key,
        way=way.way,
        run=result.run,
        ran_on=ran_on,
        share=_share(comparison, way, steps=len(result.losses), each_epoch=job.batches.steps_per_epoch),
        seconds=max(ended_at_s - began_at_s, 1e-6),
        usd=result.bill.cost_usd,
        at_s=ended_at_s,
    )
    _file(f"run {result.run}", took)


def file_server_run(provision: Provision, result: "ServerResult", job: Job, *, ran_on: str) -> None:
    """File a run around a parameter server on the machines of `provision`, which were there when it began."""
    found = _compared(provision, job.samples)
    pushed = sum(push.samples for push in result.pushes)
    steps = len(result.losses) or round(pushed / job.plan.global_batch)
    if found is None or not steps:
        return
    comparison, way = found
    took = WayRun(
        comparison=comparison.key,
        way=way.way,
        run=result.run,
        ran_on=ran_on,
        share=_share(comparison, way, steps=steps, each_epoch=job.batches.steps_per_epoch),
        seconds=max(result.seconds, 1e-6),
        usd=result.usd,
        at_s=time.time(),
        with_start=False,
    )
    _file(f"run {result.run}", took)


def _share(comparison: Comparison, way: ComparedWay, *, steps: int, each_epoch: int) -> float:
    """The share of the job that `steps` steps are. Epochs omit samples that fill no batch, so they are compared."""
    epochs = comparison.job.epochs
    return steps / way.iterations if epochs is None else steps / each_epoch / epochs


def _compared(one: Plan | Provision, samples: int) -> tuple[Comparison, ComparedWay] | None:
    """The newest comparison for so many samples that has a way with this plan, or with what this rents; and the way."""
    comparisons = [comparison for comparison in read_all().comparisons if comparison.job.samples == samples]
    if not comparisons:  # as in most cases
        return None
    from funcpipe.neighbours.history.hindsight import plan_key, way_key

    key = plan_key(one) if isinstance(one, Plan) else way_key(one)
    found = ((comparison, way) for comparison in reversed(comparisons) for way in comparison.ways if way.key == key)
    return next(found, None)


def _file(what: str, entry: Entry) -> None:
    with filing(what):
        if (path := history_file()) is not None:
            append(path, [entry])
