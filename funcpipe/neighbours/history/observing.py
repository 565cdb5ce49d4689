"""Observations of a finished run beside its plan's predictions, for the local history."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from statistics import mean, median

from funcpipe.analysis.compare import full_steps, typical_iteration_s
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Estimate, Observation, Plan, PlatformSpec, Quantity, Resource, Trace
from funcpipe.core.history import LOCAL, local_place
from funcpipe.core.texts import worker_name
from funcpipe.neighbours.history.comparing import file_way_run
from funcpipe.neighbours.history.journal import append, filing, history_file
from funcpipe.neighbours.history.learned import sizes_of

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
    at_s = max((report.ended_at_s for report in result.workers), default=0.0)
    rows = [
        *_work(plan, estimate, trace),
        *_starts(plan, functions, result.start_s),
        (sizes_of(plan), Quantity.ITERATION, estimate.iteration_s, typical_iteration_s(trace)),
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
