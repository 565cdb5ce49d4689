"""Filing in the local history: runs beside their predictions, comparisons of ways, and runs by one of them.

A run belongs to the newest comparison that has a way with its plan, or with the machines that it trains on, for as many
samples. Errors are warnings, and fail nothing else.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from statistics import mean, median
from typing import TYPE_CHECKING

from funcpipe.analysis.compare import full_steps, typical_iteration_s
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Estimate, Observation, Plan, PlatformSpec, Quantity, Resource, Trace
from funcpipe.core.history import LOCAL, ComparedWay, Comparison, WayRun, local_place
from funcpipe.core.provision import Provision, ProvisionTable
from funcpipe.core.texts import worker_name
from funcpipe.neighbours.history.journal import Entry, append, filing, history_file, read_all
from funcpipe.neighbours.history.learned import sizes_of

if TYPE_CHECKING:
    from funcpipe.neighbours.parameter_server.training import ServerResult


_COMPUTE = ("forward", "backward")
_TRANSFER = ("put-activation", "get-activation", "put-gradient", "get-gradient")


def file_run(prepared: PreparedRun, result: RunResult) -> None:
    """File what the run took, if its plan has predicted it; errors are warnings, and do not fail the run."""
    with filing(f"run {result.run}"):
        if (path := history_file()) is None:
            return
        spec = prepared.platform.spec
        ran_on = place_of(prepared.platform.url, spec)
        append(path, observed(prepared.job.plan, spec, result, ran_on=ran_on))
        file_way_run(prepared, result, ran_on=ran_on)


def place_of(url: str, spec: PlatformSpec) -> str:
    """The place where functions ran: the platform's name, or `local`, if need be with whose limits."""
    return local_place(spec.name) if url.startswith(f"{LOCAL}:") else spec.name


def observed(plan: Plan, functions: PlatformSpec, result: RunResult, *, ran_on: str) -> tuple[Observation, ...]:
    """The predictions of `plan` beside observations of `result`; none without an estimate or without a trace of steps.

    `functions` says how long their starts were expected to take.
    """
    estimate, trace = plan.estimate, result.trace
    if estimate is None or len(estimate.stages) != len(plan.stages) or not plan.platform:
        return ()
    if all(event.lane is Resource.LOAD for event in trace.events):
        return ()
    expected_s = estimate.iteration_s if estimate.meeting_s is None else estimate.meeting_s  # which have the most tasks
    at_s = max((report.ended_at_s for report in result.workers), default=0.0)
    rows = [
        *_work(plan, estimate, trace),
        *_starts(plan, functions, result.start_s),
        (sizes_of(plan), Quantity.ITERATION, expected_s, typical_iteration_s(trace)),
    ]
    return tuple(
        Observation(
            run=result.run,
            platform=plan.platform,
            ran_on=ran_on,
            size=size,
            model=plan.model,
            quantity=quantity,
            predicted_s=predicted_s,
            observed_s=max(observed_s, 0.0),
            at_s=at_s,
        )
        for size, quantity, predicted_s, observed_s in rows
    )


def _work(plan: Plan, estimate: Estimate, trace: Trace) -> Iterator[tuple[str, Quantity, float, float]]:
    """Seconds of one function in one iteration, by size: the mean over the stages with that size."""
    each = plan.micro_batches / plan.replicas
    for size in dict.fromkeys(stage.size for stage in plan.stages):
        stages = [number for number, stage in enumerate(plan.stages) if stage.size == size]
        own = [estimate.stages[number] for number in stages]
        compute_s = mean(stage.forward_s + stage.backward_s for stage in own)
        moved_s = mean(
            stage.forward_upload_s + stage.forward_download_s + stage.backward_upload_s + stage.backward_download_s
            for stage in own
        )
        functions = len(stages) * plan.replicas
        yield size, Quantity.COMPUTE, each * compute_s, _busy_s(trace, stages, _COMPUTE) / functions
        if moved_s:
            yield size, Quantity.TRANSFER, each * moved_s, _busy_s(trace, stages, _TRANSFER) / functions


def _busy_s(trace: Trace, stages: Collection[int], kinds: Collection[str]) -> float:
    """Seconds in which functions of `stages` worked on tasks of `kinds`, without waiting: the median step."""
    by_step = dict.fromkeys(full_steps(trace), 0.0)
    for event in trace.events:
        if event.step in by_step and event.stage in stages and event.task.partition(".")[0] in kinds:
            by_step[event.step] += event.busy_s
    return median(by_step.values())


def _starts(
    plan: Plan, functions: PlatformSpec, start_s: Mapping[str, float]
) -> Iterator[tuple[str, Quantity, float, float]]:
    """Seconds from the invocation of a function to its first line, by size: the median."""
    seen: dict[str, list[float]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        workers = (worker_name(number, replica) for replica in range(plan.replicas))
        seen[stage.size] += [start_s[worker] for worker in workers if worker in start_s]
    cold_s = {size.name: size.cold_start_s for size in functions.sizes}
    for size, seconds_of in seen.items():
        if seconds_of:
            known_s = cold_s.get(size)
            yield size, Quantity.START_UP, functions.cold_start_s if known_s is None else known_s, median(seconds_of)


def filed(table: ProvisionTable) -> ProvisionTable:
    """`table`, which is now in the history, if any of its ways can do the job."""
    from funcpipe.neighbours.history.hindsight import comparison_of

    if table.provisions:
        file_comparison(comparison_of(table, at_s=time.time()))
    return table


def file_comparison(comparison: Comparison) -> None:
    """File a comparison of ways, or of places, to do a job."""
    _file("the comparison of ways", comparison)


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
